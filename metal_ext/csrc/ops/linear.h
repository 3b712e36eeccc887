#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/packed_linear.h"

// A model's layers over packed weights, on the CPU. All numbers are float32.
namespace quire::ops {

struct Norm {
  mx::array weight;  // [inputs]
  double eps;
};

// Throw std::invalid_argument unless x is float32 rows of so many numbers, or a norm is of them.
void check_floats(const char* name, const mx::array& x, size_t row_numbers);
void check_norm(const Norm& norm, size_t numbers);

// x [R, ...], of `inputs` numbers a row -> [R, outputs]: of the rows' RMS norm where there is one,
// and plus `residual` [R, outputs] where there is one.
mx::array linear(
    const mx::array& x, const Packed& packed, const std::optional<Norm>& norm,
    const std::optional<mx::array>& residual, const Workers& workers);

// The same, whose outputs are heads: an array [R, count, outputs / all counts] for each count.
std::vector<mx::array> linear_heads(
    const mx::array& x, const Packed& packed, const std::vector<int64_t>& heads,
    const std::optional<Norm>& norm, const std::optional<mx::array>& residual,
    const Workers& workers);

// x + down(SiLU(gate) * up), of the RMS norm of x [R, hidden]. gate_up: both as one layer, the
// gates first.
mx::array gated_mlp(
    const mx::array& x, const Norm& norm, const Packed& gate_up, const Packed& down,
    const Workers& workers);

// x [R, n], each row divided by its root mean square and multiplied with the weight.
mx::array rms_norm(const mx::array& x, const Norm& norm, const Workers& workers);

// ids [T] int32 -> rows [T, inputs] of the layer, as an embedding has them. What an id is, is known
// when it is evaluated, and an error of then would end the whole step: the row of an id outside of
// the layer's outputs is NaN, which ends the one request that it belongs to.
mx::array packed_rows(const mx::array& ids, const Packed& packed, const Workers& workers);

}  // namespace quire::ops
