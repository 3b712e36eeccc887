// Normalises and rotates (RoPE) a layer's queries and keys, and writes K and V, in one kernel.
#include "rows.h"

// Runs on (query_heads + kv_heads, rows) threadgroups of one simdgroup. Each computes one head, and
// writes K and V if it is a KV head. queries and queries_out are [rows][query_heads][D], keys and
// values [rows][kv_heads][D]. A lane computes kPairs pairs of dimensions, named low and high. Only
// the first 2 * turned dimensions of a head rotate. The pairs lie in a head like this:
//   dimension  | low, turned | high, turned | low ......... | high ........ |
//              0           turned        2 turned      D / 2 + turned       D
template <typename T, typename KV, int D, Rows kind>
[[kernel, max_total_threads_per_threadgroup(32)]] void project_append(
    const device T* queries [[buffer(0)]],
    const device T* keys [[buffer(1)]],
    const device T* values [[buffer(2)]],
    const device float* query_weight [[buffer(3)]],
    const device float* key_weight [[buffer(4)]],
    const device RowEntry* rows [[buffer(5)]],
    const device ulong* pages [[buffer(6)]],
    device uchar* arena [[buffer(7)]],
    device T* queries_out [[buffer(8)]],
    constant ProjectArguments& arguments [[buffer(9)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kHalf = D / 2;
  constexpr uint kPairs = kHalf / 32;
  const bool is_query = group.x < arguments.query_heads;
  const uint kv_head = group.x - arguments.query_heads;
  const ulong query = (ulong(group.y) * arguments.query_heads + group.x) * D;
  const ulong kv = (ulong(group.y) * arguments.kv_heads + kv_head) * D;
  const device T* source = is_query ? queries + query : keys + kv;
  const device float* weight = is_query ? query_weight : key_weight;
  const uint first = lane * kPairs;
  const uint turned = arguments.turned;

  float low[kPairs];
  float high[kPairs];
  uint low_at[kPairs];
  uint high_at[kPairs];
  QUIRE_UNROLL
  for (uint i = 0; i < kPairs; ++i) {
    const bool turns = first + i < turned;
    low_at[i] = turns ? first + i : turned + first + i;
    high_at[i] = turns ? turned + first + i : kHalf + first + i;
    low[i] = float(source[low_at[i]]);
    high[i] = float(source[high_at[i]]);
  }

  if (arguments.normed != 0) {
    float squares = 0.0f;
    QUIRE_UNROLL
    for (uint i = 0; i < kPairs; ++i) {
      squares = fma(low[i], low[i], fma(high[i], high[i], squares));
    }
    const float norm = precise::rsqrt(simd_sum(squares) / float(D) + arguments.eps);
    QUIRE_UNROLL
    for (uint i = 0; i < kPairs; ++i) {
      low[i] = low[i] * norm * weight[low_at[i]];
      high[i] = high[i] * norm * weight[high_at[i]];
    }
  }

  const RowEntry row = rows[group.y];
  QUIRE_UNROLL
  for (uint i = 0; i < kPairs; ++i) {
    if (first + i < turned) {
      const float angle = float(row.position) * arguments.frequencies[first + i];
      const float cosine = precise::cos(angle) * arguments.magnitude;
      const float sine = precise::sin(angle) * arguments.magnitude;
      const float x = low[i];
      const float y = high[i];
      low[i] = x * cosine - y * sine;
      high[i] = x * sine + y * cosine;
    }
  }

  if (is_query) {
    QUIRE_UNROLL
    for (uint i = 0; i < kPairs; ++i) {
      queries_out[query + low_at[i]] = static_cast<T>(low[i]);
      queries_out[query + high_at[i]] = static_cast<T>(high[i]);
    }
    return;
  }
  const RowSpace space = {pages, arena};
  constant LayerPlace& place = arguments.place;
  device KV* key = kv_head_row<kind, KV, D>(
      space, row, place, place.key_offset, row.position, kv_head);
  device KV* value = kv_head_row<kind, KV, D>(
      space, row, place, place.value_offset, row.position, kv_head);
  QUIRE_UNROLL
  for (uint i = 0; i < kPairs; ++i) {
    key[low_at[i]] = static_cast<KV>(low[i]);
    key[high_at[i]] = static_cast<KV>(high[i]);
    value[low_at[i]] = static_cast<KV>(float(values[kv + low_at[i]]));
    value[high_at[i]] = static_cast<KV>(float(values[kv + high_at[i]]));
  }
}
