#include "cpu/filter.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>

// Finds the smallest weight that passes top_k and top_p, without sorting the weights.
namespace quire::cpu {
namespace {

// Read as integers, floats from 0 to 1 keep their order, and their upper two bits are 0. So three
// histograms, each over ten bits, find one weight: each splits a bucket of the previous one.
constexpr uint32_t kBucketBits = 10;
constexpr uint32_t kBuckets = 1u << kBucketBits;
constexpr int kFirstShift = 2 * kBucketBits;

// The smallest weight that is not 0.
constexpr float kLeastWeight = std::numeric_limits<float>::min();
// The number of weights in a piece of a row. The largest weight of each piece gives a first bound.
constexpr size_t kPieceWeights = 256;
// The lower bound from top_p is multiplied by this, so that rounding cannot make it too high.
constexpr double kBelow = 0.5;

// A run of equal weights among all weights in falling order.
struct Run {
  float weight;
  size_t count;
  size_t before;      // number of larger weights
  double sum_before;  // sum of the larger weights
};

struct Bucket {
  double sum;
  size_t count;
};

// Returns the last run whose larger weights are fewer than `count` and add up to less than `sum`.
// If there is no such run, returns the first run.
Run last_run(float* weights, size_t n, size_t count, double sum) {
  Run run{0.0f, 0, 0, 0.0};
  uint32_t chosen = 0;
  for (int shift = kFirstShift; shift >= 0; shift -= kBucketBits) {
    std::array<Bucket, kBuckets> buckets{};
    size_t kept = 0;
    for (size_t i = 0; i < n; ++i) {
      const float weight = weights[i];
      const uint32_t bits = std::bit_cast<uint32_t>(weight) >> shift;
      if (bits >> kBucketBits == chosen) {
        weights[kept++] = weight;
        Bucket& bucket = buckets[bits % kBuckets];
        bucket.sum += weight;
        ++bucket.count;
      }
    }
    n = kept;
    size_t before = run.before;
    double sum_before = run.sum_before;
    uint32_t last = 0;
    bool first = true;
    for (uint32_t b = kBuckets; b-- > 0;) {
      if (buckets[b].count == 0) {
        continue;
      }
      if (!first && !(before < count && sum_before < sum)) {
        break;
      }
      first = false;
      last = b;
      run = {0.0f, buckets[b].count, before, sum_before};
      before += buckets[b].count;
      sum_before += buckets[b].sum;
    }
    chosen = chosen << kBucketBits | last;
  }
  run.weight = std::bit_cast<float>(chosen);
  return run;
}

// Returns a lower bound for the `count` largest weights above 0, from the pieces' largest weights.
float reached_by(
    const ChooseKernels& kernels, size_t count, const float* weights, size_t n, float* scratch) {
  const size_t pieces = n / kPieceWeights;
  if (pieces < count) {
    return kLeastWeight;
  }
  for (size_t i = 0; i < pieces; ++i) {
    bool finite;
    scratch[i] = kernels.largest(weights + i * kPieceWeights, kPieceWeights, &finite);
  }
  float* const found = scratch + (count - 1);
  std::nth_element(scratch, found, scratch + pieces, std::greater<float>());
  return std::max(*found, kLeastWeight);
}

}  // namespace

float filter_floor(
    const ChooseKernels& kernels, const Filter& filter, const float* weights, size_t n,
    double total, float* scratch) {
  float floor = kLeastWeight;
  if (filter.top_k < n) {
    const float least = reached_by(kernels, filter.top_k, weights, n, scratch);
    const size_t count = kernels.collect(weights, least, n, scratch);
    const Run last =
        last_run(scratch, count, filter.top_k, std::numeric_limits<double>::infinity());
    const size_t inside = std::min(filter.top_k - last.before, last.count);
    floor = last.weight;
    total = last.sum_before + static_cast<double>(inside) * last.weight;
  }
  if (filter.top_p >= 1.0) {
    return floor;
  }
  // All weights below `rest` together are less than the part of `total` that top_p removes.
  const double rest = (1.0 - filter.top_p) * total / static_cast<double>(n);
  const float least = std::max(floor, static_cast<float>(rest * kBelow));
  const size_t count = kernels.collect(weights, least, n, scratch);
  return last_run(scratch, count, filter.top_k, filter.top_p * total).weight;
}

}  // namespace quire::cpu
