// Kernels that are wrong, each in one way that the executor must see, and some that look so.
#include <metal_stdlib>

using namespace metal;

[[kernel]] void divergent_sum(
    device float* out [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  if (lane < 16) {
    out[lane] = simd_sum(1.0f);
  }
}

[[kernel]] void different_sums(
    device float* out [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  if (lane < 16) {
    out[lane] = simd_sum(1.0f);
  } else {
    out[lane] = simd_sum(2.0f);
  }
}

[[kernel]] void barrier_in_a_branch(
    device float* out [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  if (index != 5) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[index] = 1.0f;
}

[[kernel]] void barrier_of_some_simdgroups(
    device float* out [[buffer(0)]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  if (simdgroup != 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[simdgroup] = 1.0f;
}

[[kernel]] void different_barriers(
    device float* out [[buffer(0)]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  if (simdgroup == 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[simdgroup] = 1.0f;
}

[[kernel]] void too_much_memory(
    device float* out [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  threadgroup float first[4096];
  threadgroup float second[4097];
  first[index] = 1.0f;
  second[index] = 1.0f;
  out[index] = first[index] + second[index];
}

[[kernel]] void absent_lane(
    device float* out [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  out[lane] = simd_shuffle_xor(1.0f, ushort(16));
}

[[kernel]] void fifth_component(
    device float* out [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  const float4 four = float4(1.0f);
  out[index] = four[index];
}

[[kernel, max_total_threads_per_threadgroup(64)]] void few_threads(
    device float* out [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  out[index] = 1.0f;
}

[[kernel]] void unwritten_memory(
    device float* out [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  threadgroup float values[64];
  out[index] = values[index];
}

[[kernel]] void unordered_memory(
    device float* out [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  threadgroup float values[64];
  values[index] = float(index);
  out[index] = values[63 - index];
}

[[kernel]] void ordered_memory(
    device float* out [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  threadgroup float values[64];
  values[index] = float(index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[index] = values[63 - index];
}

[[kernel]] void grid_sums(
    device float* out [[buffer(0)]],
    uint2 at [[thread_position_in_grid]],
    uint2 size [[threads_per_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const float lanes = simd_sum(1.0f);
  const float last = simd_max(float(lane));
  out[at.y * size.x + at.x] = lanes == last + 1.0f ? lanes : -1.0f;
}
