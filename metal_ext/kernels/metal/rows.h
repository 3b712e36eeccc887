// Functions for all kernels. They compute rows' addresses in K and V, and load and store numbers.
#pragma once

#include "arguments.h"

#include <metal_stdlib>

using namespace metal;
using namespace quire::metal;

// Unrolls a loop over an array of a thread. If all indices are constants, the array stays in
// registers instead of the device's memory.
#define QUIRE_UNROLL _Pragma("clang loop unroll(full)")

// The three kinds of memory for K and V. They differ only in a row's address (see LayerPlace).
enum class Rows { sparse, dense, paged };

// The arguments of a kernel that are needed for addresses of rows. Sparse rows need no argument.
struct RowSpace {
  const device ulong* pages;  // only paged uses this
  device uchar* arena;        // only dense uses this
};

// Returns the address of the K or V at position `token` of the row's sequence, in one region.
template <Rows kind>
inline device uchar* kv_row(
    RowSpace space, RowEntry row, constant LayerPlace& place, ulong region_offset, uint token) {
  if (kind == Rows::paged) {
    const ulong block = space.pages[row.first_page + (token >> place.block_shift)];
    const uint in_block = token & ((1u << place.block_shift) - 1);
    return reinterpret_cast<device uchar*>(
        block + region_offset + ulong(in_block) * place.row_bytes);
  }
  const ulong offset = row.base + region_offset + ulong(token) * place.row_bytes;
  if (kind == Rows::dense) {
    return space.arena + offset;
  }
  return reinterpret_cast<device uchar*>(offset);
}

// Returns the address of one KV head's part of the K or V at position `token`.
template <Rows kind, typename KV, int D>
inline device KV* kv_head_row(
    RowSpace space, RowEntry row, constant LayerPlace& place, ulong region_offset, uint token,
    uint kv_head) {
  device uchar* start = kv_row<kind>(space, row, place, region_offset, token);
  return reinterpret_cast<device KV*>(start) + kv_head * uint(D);
}

// Loads N numbers at once. The address must be aligned to N numbers, as K and V are; the host sees
// to it that MLX's arrays are.
template <int N, typename T>
inline vec<T, N> load(const device T* source) {
  return *reinterpret_cast<const device vec<T, N>*>(source);
}

template <int N, typename T>
inline vec<float, N> as_floats(vec<T, N> x) {
  vec<float, N> wide;
  QUIRE_UNROLL
  for (uint i = 0; i < N; ++i) {
    wide[i] = float(x[i]);
  }
  return wide;
}

template <typename T>
inline float4 load_floats(const device T* source) {
  return as_floats<4, T>(load<4>(source));
}

// Rounds N numbers to T, and stores them at once.
template <int N, typename T>
inline void store(device T* target, vec<float, N> x) {
  vec<T, N> narrow;
  QUIRE_UNROLL
  for (uint i = 0; i < N; ++i) {
    narrow[i] = static_cast<T>(x[i]);
  }
  *reinterpret_cast<device vec<T, N>*>(target) = narrow;
}
