// Finds the rows of K and V, and reads and writes their numbers, in all kernels.
#pragma once

#include "arguments.h"

#include <metal_stdlib>

using namespace metal;
using namespace quire::metal;

// Unrolls a loop over a thread's arrays. With constant indices the arrays stay in registers instead
// of the device's memory.
#define QUIRE_UNROLL _Pragma("clang loop unroll(full)")

// The three kinds of device memory, which differ in the address of a row alone (arguments.h).
enum class Rows { sparse, dense, paged };

// The kernel's arguments, beside the row, that addresses come from. Sparse rows need neither.
struct RowSpace {
  const device ulong* pages;  // only paged uses this
  device uchar* arena;        // only dense uses this
};

// Returns the address of a token of the row's sequence in the region at `region_offset`.
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

// Returns the address of one KV head's numbers of a token.
template <Rows kind, typename KV, int D>
inline device KV* kv_head_row(
    RowSpace space, RowEntry row, constant LayerPlace& place, ulong region_offset, uint token,
    uint kv_head) {
  device uchar* start = kv_row<kind>(space, row, place, region_offset, token);
  return reinterpret_cast<device KV*>(start) + kv_head * uint(D);
}

// Loads N numbers at once, of K and V alone: arrays of the host may begin at any address.
template <int N, typename KV>
inline vec<KV, N> load(const device KV* source) {
  return *reinterpret_cast<const device vec<KV, N>*>(source);
}

template <typename KV>
inline void store4(device KV* target, float4 x) {
  *reinterpret_cast<device vec<KV, 4>*>(target) =
      vec<KV, 4>(static_cast<KV>(x.x), static_cast<KV>(x.y), static_cast<KV>(x.z),
                 static_cast<KV>(x.w));
}

// Loads four numbers of an array that may begin anywhere.
template <typename T>
inline float4 as_floats(const device T* source) {
  return float4(float(source[0]), float(source[1]), float(source[2]), float(source[3]));
}
