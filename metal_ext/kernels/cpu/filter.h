#pragma once

#include <cstddef>

#include "cpu/kernels.h"

// Filters tokens by top_k and top_p. Weights are probabilities times one factor, and at most 1.
namespace quire::cpu {

struct Filter {
  size_t top_k;  // at least 1; the vocabulary's size turns this filter off
  double top_p;  // 1 turns this filter off
};

// Returns the smallest weight that passes the filter. In order of falling weights, a token passes
// if it is among the first top_k, and the share of all earlier tokens is below top_p. The first
// token always passes. `total` is the sum of the n weights, and `scratch` has n floats.
float filter_floor(
    const ChooseKernels& kernels, const Filter& filter, const float* weights, size_t n,
    double total, float* scratch);

}  // namespace quire::cpu
