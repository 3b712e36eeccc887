// How kernels find the rows of K and V, and read and write their numbers.
#pragma once

#include "arguments.h"

#include <metal_stdlib>

using namespace metal;
using namespace quire::metal;

// Before loops that index a thread's arrays: those are registers where every index is a constant,
// and memory of the device otherwise.
#define QUIRE_UNROLL _Pragma("clang loop unroll(full)")

// The three substrates differ in nothing but the address of a row (arguments.h).
enum class Rows { sparse, dense, paged };

// The bindings that addresses come from, beside the row itself. Sparse rows need neither.
struct RowSpace {
  const device ulong* pages;  // paged
  device uchar* arena;        // dense
};

// Token `token` of the row's sequence, in the region that begins at `region_offset`.
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

// The same for one KV head's elements.
template <Rows kind, typename KV, int D>
inline device KV* kv_head_row(
    RowSpace space, RowEntry row, constant LayerPlace& place, ulong region_offset, uint token,
    uint kv_head) {
  device uchar* start = kv_row<kind>(space, row, place, region_offset, token);
  return reinterpret_cast<device KV*>(start) + kv_head * uint(D);
}

// N numbers at once. Rows begin at multiples of 16 bytes; arrays of the host need not.
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

// Four numbers of an array that may begin anywhere.
template <typename T>
inline float4 as_floats(const device T* source) {
  return float4(float(source[0]), float(source[1]), float(source[2]), float(source[3]));
}
