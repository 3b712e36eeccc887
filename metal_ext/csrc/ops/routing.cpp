#include "ops/routing.h"

#include <algorithm>

namespace quire::ops {
namespace {

// The `chosen` largest of n shares, in falling order, by insertion; equal ones in rising order of
// their numbers. A NaN is larger than nothing.
void take_largest(const float* shares, size_t n, size_t chosen, size_t* best) {
  for (size_t i = 0; i < n; ++i) {
    size_t place = std::min(i, chosen);
    while (place > 0 && shares[i] > shares[best[place - 1]]) {
      --place;
    }
    if (place < chosen) {
      const size_t end = std::min(i, chosen - 1);
      std::move_backward(best + place, best + end, best + end + 1);
      best[place] = i;
    }
  }
}

}  // namespace

Routing route(const cpu::LayerKernels& kernels, float* logits, size_t rows, size_t stride,
              size_t experts, size_t chosen, bool normalised) {
  Routing found{chosen, std::vector<size_t>(rows * chosen), std::vector<float>(rows * chosen)};
  for (size_t row = 0; row < rows; ++row) {
    float* const shares = logits + row * stride;
    kernels.softmax(shares, experts, shares);
    size_t* const best = found.experts.data() + row * chosen;
    take_largest(shares, experts, chosen, best);
    float sum = 0.0f;
    for (size_t rank = 0; rank < chosen; ++rank) {
      sum += shares[best[rank]];
    }
    for (size_t rank = 0; rank < chosen; ++rank) {
      const float share = shares[best[rank]];
      found.weights[row * chosen + rank] = normalised ? share / sum : share;
    }
  }
  return found;
}

// A counting sort.
ExpertRows by_expert(const Routing& routing, size_t experts) {
  const size_t pairs = routing.experts.size();
  std::vector<size_t> next(experts + 1);  // where an expert's next pair goes
  for (const size_t expert : routing.experts) {
    ++next[expert + 1];
  }
  ExpertRows sorted{std::vector<size_t>(pairs), std::vector<size_t>(pairs), {}};
  for (size_t expert = 0; expert < experts; ++expert) {
    const size_t count = next[expert + 1];
    for (size_t done = 0; done < count; done += cpu::kMaxRows) {
      sorted.runs.push_back({expert, next[expert] + done, std::min(count - done, cpu::kMaxRows)});
    }
    next[expert + 1] += next[expert];
  }
  for (size_t pair = 0; pair < pairs; ++pair) {
    const size_t place = next[routing.experts[pair]]++;
    sorted.rows[place] = pair / routing.chosen;
    sorted.places[pair] = place;
  }
  return sorted;
}

}  // namespace quire::ops
