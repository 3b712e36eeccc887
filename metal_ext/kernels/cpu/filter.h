#pragma once

#include <cstddef>

#include "cpu/kernels.h"

// Filters tokens by top_k and top_p. A weight is a probability divided by the largest probability.
namespace quire::cpu {

struct Filter {
  size_t top_k;  // at least 1; the vocabulary's size turns this filter off
  double top_p;  // 1 turns this filter off
};

// Returns the smallest weight that passes the filter. Tokens pass in falling order of weight: at
// most top_k, until their sum reaches top_p of the sum of the top_k largest weights. The first
// token always passes. `total` is the sum of the n weights, and `scratch` has n floats.
float filter_floor(
    const ChooseKernels& kernels, const Filter& filter, const float* weights, size_t n,
    double total, float* scratch);

}  // namespace quire::cpu
