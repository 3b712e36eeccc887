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

// Loads N numbers of K or V at once. The address must be aligned to N numbers, as K and V are.
template <int N, typename KV>
inline vec<KV, N> load(const device KV* source) {
  return *reinterpret_cast<const device vec<KV, N>*>(source);
}

// Loads four numbers at an address aligned to four.
template <typename T>
inline float4 load_floats(const device T* source) {
  const vec<T, 4> x = load<4>(source);
  return float4(float(x.x), float(x.y), float(x.z), float(x.w));
}

template <typename KV>
inline void store4(device KV* target, float4 x) {
  *reinterpret_cast<device vec<KV, 4>*>(target) =
      vec<KV, 4>(static_cast<KV>(x.x), static_cast<KV>(x.y), static_cast<KV>(x.z),
                 static_cast<KV>(x.w));
}

// Loads four numbers of an array of any alignment, such as MLX's arrays.
template <typename T>
inline float4 as_floats(const device T* source) {
  return float4(float(source[0]), float(source[1]), float(source[2]), float(source[3]));
}
