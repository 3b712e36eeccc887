#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "ops/linear.h"
#include "ops/packed_linear.h"

// An MLP that is a mixture of experts, on the CPU. All numbers are float32.
namespace quire::ops {

struct Mixture {
  Packed router;  // an output for each expert, and where there is a shared one its gate behind them
  PackedStack gate_up;  // both as one layer, the gates first
  PackedStack down;
  std::optional<std::pair<Packed, Packed>> shared;  // gate_up and down of an expert of all rows
  int64_t chosen;                                   // experts of each row
  bool normalised;                                  // whether their weights sum to 1
};

// x + the sum of weight * down(SiLU(gate) * up) over the experts that the router chooses for each
// row, the best one first, of the RMS norm of x [R, hidden]; plus the shared expert's, times the
// sigmoid of its gate. The weights are the softmax over all experts.
mx::array mixture_mlp(
    const mx::array& x, const Norm& norm, const Mixture& mixture, const Workers& workers);

}  // namespace quire::ops
