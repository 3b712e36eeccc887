// Combines a row's (token's) partial results, one for each split of the earlier tokens, in order.
#include "rows.h"

// Runs on (query_heads, rows) threadgroups of one simdgroup. Row r's splits are the tasks
// [first_task[r], first_task[r + 1]) of decode_split. out is [rows][query_heads][D].
template <typename T, int D>
[[kernel, max_total_threads_per_threadgroup(32)]] void decode_combine(
    const device float* sums [[buffer(0)]],
    const device float2* softened [[buffer(1)]],
    const device uint* first_task [[buffer(2)]],
    device T* out [[buffer(3)]],
    constant AttentionArguments& arguments [[buffer(4)]],
    const device float* sinks [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kNumbers = D / 32;  // numbers that a lane computes
  const uint first = first_task[group.y];
  const uint end = first_task[group.y + 1];
  if (end - first == 1) {
    return;  // decode_split has written the row's result already
  }
  float highest = -INFINITY;
  for (uint task = first + lane; task < end; task += 32) {
    highest = max(highest, softened[ulong(task) * arguments.query_heads + group.x].x);
  }
  highest = simd_max(highest);

  float total = 0.0f;
  if (arguments.sinks != 0) {
    highest = max(highest, sinks[group.x]);
    total = precise::exp(sinks[group.x] - highest);
  }
  float sum[kNumbers];
  QUIRE_UNROLL
  for (uint i = 0; i < kNumbers; ++i) {
    sum[i] = 0.0f;
  }
  for (uint task = first; task < end; ++task) {
    const ulong at = ulong(task) * arguments.query_heads + group.x;
    const float2 split = softened[at];
    const float factor = precise::exp(split.x - highest);
    total = fma(factor, split.y, total);
    const device float* part = sums + at * D + lane * kNumbers;
    QUIRE_UNROLL
    for (uint i = 0; i < kNumbers; ++i) {
      sum[i] = fma(factor, part[i], sum[i]);
    }
  }
  device T* target = out + (ulong(group.y) * arguments.query_heads + group.x) * D;
  QUIRE_UNROLL
  for (uint i = 0; i < kNumbers; ++i) {
    target[lane * kNumbers + i] = static_cast<T>(sum[i] / total);
  }
}
