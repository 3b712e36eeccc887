#pragma once

#include <cstddef>

#include "cpu/kernels.h"

// Filters tokens by top_k and top_p. Weights are probabilities times a common factor, at most 1.
namespace quire::cpu {

struct Filter {
  size_t top_k;  // at least 1; the number of tokens turns it off
  double top_p;  // 1 turns it off
};

// Returns the smallest weight that stays. In falling order, a token stays while it is among the
// first top_k and the earlier tokens' share is below top_p. The first token always stays; tokens of
// weight 0 do not count. Takes O(n). weights: [n]; total: their sum; scratch: [n].
float filter_floor(
    const ChooseKernels& kernels, const Filter& filter, const float* weights, size_t n,
    double total, float* scratch);

}  // namespace quire::cpu
