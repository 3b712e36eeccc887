#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "ops/metal/stored_matrix.h"

// Mixtures of experts, as Metal kernels compute them for a few rows (route.metal, experts.metal).
namespace quire::ops {

// The weights of a mixture's experts.
struct Mixture {
  // `gate_up` has the stacks of gate and of up, or one that has both of each expert. `shared` is
  // empty, or has gate, up and down of the shared expert. Throws std::invalid_argument if sizes or
  // types do not fit, and for what the kernels do not have: gate and up of two formats, a shared
  // expert of another format or size than the others, or with biases.
  Mixture(
      const std::vector<std::shared_ptr<StoredMatrix>>& gate_up,
      std::shared_ptr<StoredMatrix> down_projection,
      const std::vector<std::shared_ptr<StoredMatrix>>& shared_expert, int64_t chosen_experts,
      bool normalised_weights, const std::string& kind);

  std::vector<Stored> matrices() const;  // each once
  bool has_shared() const { return !shared.empty(); }
  // Returns the type of activations; none for any type.
  const std::optional<mx::Dtype>& activations() const { return type; }

  Stored gate;
  Stored up;
  Stored down;
  std::vector<Stored> shared;
  uint32_t first_up;  // output of each expert with which `up` begins
  uint32_t inner;
  uint32_t chosen;
  bool normalised;
  uint32_t gate_number;
  std::optional<mx::Dtype> type;
};

}  // namespace quire::ops
