#pragma once

#include <cstddef>

#include "cpu/kernels.h"

// The filters top_k and top_p over a row's tokens. The weights are the tokens' probabilities times
// any number, such that none is above 1.
namespace quire::cpu {

struct Filter {
  size_t top_k;  // at least 1; as many as there are tokens: off
  double top_p;  // 1: off
};

// The weight below which a token is out: that of the last one, in falling order, that is among the
// first top_k and before which less than the share top_p of these has been passed. The first token
// is never out, and a token without weight counts for nothing. Takes O(n).
// weights: [n]; total: their sum. scratch: [n].
float filter_floor(
    const ChooseKernels& kernels, const Filter& filter, const float* weights, size_t n,
    double total, float* scratch);

}  // namespace quire::cpu
