#pragma once

#include <optional>
#include <vector>

#include "mlx/array.h"

// What queries and keys take between their projections and attention.
namespace quire::ops {

namespace mx = mlx::core;

// RMS norms over head_dim. Weights: [head_dim] float32.
struct QKNorms {
  mx::array query_weight;
  mx::array key_weight;
  double eps;
};

// How heads turn: of their first 2 * pairs dimensions i and i + pairs against each other, by
// position * frequencies[i] radians; and what these are multiplied by when they have turned.
struct RopeTable {
  // Throws std::invalid_argument where a number is none, or there are more or fewer of them than
  // any kernel has use for.
  RopeTable(std::vector<double> frequencies, double magnitude);

  // Throws std::invalid_argument where such heads have fewer dimensions than turn.
  void check_head_dim(int head_dim) const;

  const std::vector<double> frequencies;  // [pairs]
  const double magnitude;
};

// Throws std::invalid_argument unless both weights are [head_dim] float32.
void check_norms(const std::optional<QKNorms>& norms, int head_dim);

}  // namespace quire::ops
