// Softmax attention of single rows (tokens). A row attends to the positions that it sees, up to its
// own. They are cut into splits. A threadgroup of decode_split computes one split for up to
// kTileHeads query heads that share a KV head. The heads are the components of a float4, so that K
// and V are read once for all heads. combine.metal combines the splits of a row.
#include "rows.h"

constant constexpr uint kDecodeSimdgroups = kDecodeThreads / 32;
// A lane loads this many rows of K, or of V, before it uses the first, so that memory stays busy.
constant constexpr uint kKeysAhead = 2;
constant constexpr uint kValuesAhead = 4;
static_assert(kTileHeads == 4, "the heads of a tile are the components of a float4");

// A split (run of positions) of one row's keys, for a tile of query heads that share a KV head.
struct Split {
  RowEntry row;
  uint first;    // first position
  uint tokens;   // number of tokens, 1 to kSplitTokens
  uint kv_head;
  uint head;     // the tile's first query head
  uint heads;    // number of heads, 1 to kTileHeads
  bool is_whole;  // whether it is the row's only one
};

inline Split split_of(
    DecodeTask task, const device RowEntry* rows, constant AttentionArguments& arguments,
    uint tile_of_all) {
  const uint group = arguments.query_heads / arguments.kv_heads;
  const uint tiles = (group + kTileHeads - 1) / kTileHeads;
  const uint in_group = tile_of_all % tiles * kTileHeads;
  const uint kv_head = tile_of_all / tiles;
  const RowEntry row = rows[arguments.first_row + task.row];
  const uint begin = first_seen(row.position, arguments.window);
  const uint most = split_tokens(row.position - begin);
  const uint first = begin + task.split * most;
  const uint tokens = min(most, row.position + 1 - first);
  const uint heads = min(uint(kTileHeads), group - in_group);
  const bool is_whole = split_count(row.position - begin) == 1;
  return {row, first, tokens, kv_head, kv_head * group + in_group, heads, is_whole};
}

// Adds the scores of `lanes` (at least 8) neighbouring lanes, of which this lane is number `part`.
// This lane returns the sum for the head head_of_part(part).
inline float add_lanes(float4 score, uint part, uint lanes) {
  const bool odd = (part & 1) != 0;
  const float first =
      (odd ? score.z : score.x) + simd_shuffle_xor(odd ? score.x : score.z, ushort(1));
  const float second =
      (odd ? score.w : score.y) + simd_shuffle_xor(odd ? score.y : score.w, ushort(1));
  const bool upper = (part & 2) != 0;
  float sum = (upper ? second : first) + simd_shuffle_xor(upper ? first : second, ushort(2));
  for (uint apart = 4; apart < lanes; apart *= 2) {
    sum += simd_shuffle_xor(sum, ushort(apart));
  }
  return sum;
}

inline uint head_of_part(uint part) { return (part & 1) * 2 + (part >> 1 & 1); }

inline float capped(float score, float softcap) {
  return softcap == 0.0f ? score : softcap * precise::tanh(score / softcap);
}

// Computes scores[token][head] = scale * query . key for the split's tokens and the tile's heads.
template <typename T, typename KV, int D, Rows kind>
inline void score_tokens(
    const device T* queries, RowSpace space, Split split, constant AttentionArguments& arguments,
    uint simdgroup, uint lane, threadgroup float* scores) {
  // D / 8 lanes share a token; each takes four numbers from each half of the key. Lanes read
  // adjacent memory, and adding up a token's lanes takes few steps.
  constexpr uint kTokenLanes = D / 8;
  constexpr uint kTokens = 32 / kTokenLanes;
  const uint part = lane % kTokenLanes;
  const uint low = part * 4;
  const uint high = D / 2 + low;

  float4 query[8];
  QUIRE_UNROLL
  for (uint i = 0; i < 8; ++i) {
    QUIRE_UNROLL
    for (uint h = 0; h < kTileHeads; ++h) {
      const uint dim = (i < 4 ? low : high - 4) + i;
      query[i][h] = h < split.heads ? float(queries[h * D + dim]) * arguments.scale : 0.0f;
    }
  }
  constant LayerPlace& place = arguments.place;
  constexpr uint kStep = kDecodeSimdgroups * kTokens;
  for (uint start = simdgroup * kTokens; start < split.tokens; start += kKeysAhead * kStep) {
    const uint first = start + lane / kTokenLanes;
    vec<KV, 4> lows[kKeysAhead];
    vec<KV, 4> highs[kKeysAhead];
    QUIRE_UNROLL
    for (uint i = 0; i < kKeysAhead; ++i) {
      // Lanes past the end read the last token again, because later memory may not be mapped.
      const uint token = min(first + i * kStep, split.tokens - 1);
      const device KV* key = kv_head_row<kind, KV, D>(
          space, split.row, place, place.key_offset, split.first + token, split.kv_head);
      lows[i] = load<4>(key + low);
      highs[i] = load<4>(key + high);
    }
    QUIRE_UNROLL
    for (uint i = 0; i < kKeysAhead; ++i) {
      float4 score = float4(0.0f);
      QUIRE_UNROLL
      for (uint dim = 0; dim < 4; ++dim) {
        score = fma(query[dim], float4(float(lows[i][dim])), score);
        score = fma(query[4 + dim], float4(float(highs[i][dim])), score);
      }
      const uint token = first + i * kStep;
      const float sum = add_lanes(score, part, kTokenLanes);
      if (part < kTileHeads && token < split.tokens) {
        scores[token * kTileHeads + head_of_part(part)] = capped(sum, arguments.softcap);
      }
    }
  }
}

// For each head of a tile, the largest score and the sum of the weights.
struct Softened {
  float4 highest;
  float4 total;
};

// Turns scores into weights, exp(score - highest). shared has 2 * kDecodeSimdgroups elements.
inline Softened soften(
    uint tokens, uint thread_index, uint simdgroup, uint lane, threadgroup float4* scores,
    threadgroup float4* shared) {
  Softened result;
  float4 highest = float4(-INFINITY);
  for (uint token = thread_index; token < tokens; token += kDecodeThreads) {
    highest = max(highest, scores[token]);
  }
  QUIRE_UNROLL
  for (uint h = 0; h < kTileHeads; ++h) {
    highest[h] = simd_max(highest[h]);
  }
  if (lane == 0) {
    shared[simdgroup] = highest;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  result.highest = shared[0];
  for (uint i = 1; i < kDecodeSimdgroups; ++i) {
    result.highest = max(result.highest, shared[i]);
  }

  float4 total = float4(0.0f);
  for (uint token = thread_index; token < tokens; token += kDecodeThreads) {
    const float4 below = scores[token] - result.highest;
    const float4 weight = float4(
        precise::exp(below.x), precise::exp(below.y), precise::exp(below.z),
        precise::exp(below.w));
    scores[token] = weight;
    total += weight;
  }
  QUIRE_UNROLL
  for (uint h = 0; h < kTileHeads; ++h) {
    total[h] = simd_sum(total[h]);
  }
  if (lane == 0) {
    shared[kDecodeSimdgroups + simdgroup] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  result.total = shared[kDecodeSimdgroups];
  for (uint i = 1; i < kDecodeSimdgroups; ++i) {
    result.total += shared[kDecodeSimdgroups + i];
  }
  return result;
}

// The numbers of a head that one lane computes: kPieces pieces of kWidth adjacent numbers.
template <int D>
struct RowShare {
  static constant constexpr uint kNumbers = D / 32;
  static constant constexpr uint kWidth = kNumbers < 4 ? kNumbers : 4;
  static constant constexpr uint kPieces = kNumbers / kWidth;
};

// Computes a simdgroup's part of the weighted sum of values: every kDecodeSimdgroups-th token.
template <typename KV, int D, Rows kind>
inline void weigh_values(
    RowSpace space, Split split, constant LayerPlace& place, uint simdgroup, uint lane,
    const threadgroup float4* weights, thread float4* sum) {
  constexpr uint kWidth = RowShare<D>::kWidth;
  constexpr uint kPieces = RowShare<D>::kPieces;
  QUIRE_UNROLL
  for (uint i = 0; i < kPieces * kWidth; ++i) {
    sum[i] = float4(0.0f);
  }
  constexpr uint kStep = kDecodeSimdgroups;
  for (uint start = simdgroup; start < split.tokens; start += kValuesAhead * kStep) {
    vec<KV, kWidth> numbers[kValuesAhead][kPieces];
    QUIRE_UNROLL
    for (uint i = 0; i < kValuesAhead; ++i) {
      const uint token = min(start + i * kStep, split.tokens - 1);
      const device KV* value = kv_head_row<kind, KV, D>(
          space, split.row, place, place.value_offset, split.first + token, split.kv_head);
      QUIRE_UNROLL
      for (uint piece = 0; piece < kPieces; ++piece) {
        numbers[i][piece] = load<kWidth>(value + (piece * 32 + lane) * kWidth);
      }
    }
    QUIRE_UNROLL
    for (uint i = 0; i < kValuesAhead; ++i) {
      const uint token = start + i * kStep;
      if (token < split.tokens) {
        const float4 weight = weights[token];
        QUIRE_UNROLL
        for (uint n = 0; n < kPieces * kWidth; ++n) {
          const float number = float(numbers[i][n / kWidth][n % kWidth]);
          sum[n] = fma(weight, float4(number), sum[n]);
        }
      }
    }
  }
}

// Adds the sums of all simdgroups in pairs; simdgroup 0 gets the result. shared has
// kDecodeSimdgroups / 2 * kNumbers * 32 elements.
template <uint kNumbers>
inline void add_simdgroups(
    uint simdgroup, uint lane, threadgroup float4* shared, thread float4* sum) {
  for (uint receivers = kDecodeSimdgroups / 2; receivers > 0; receivers /= 2) {
    threadgroup float4* place = shared + simdgroup % receivers * kNumbers * 32 + lane;
    if (simdgroup >= receivers && simdgroup < 2 * receivers) {
      QUIRE_UNROLL
      for (uint i = 0; i < kNumbers; ++i) {
        place[i * 32] = sum[i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup < receivers) {
      QUIRE_UNROLL
      for (uint i = 0; i < kNumbers; ++i) {
        sum[i] += place[i * 32];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Runs on (kv_heads * tiles, tasks) threadgroups of kDecodeThreads. queries and out are
// [rows][query_heads][D]. If a row has one split, the result goes to out. Otherwise each split's
// weighted sum of values goes to sums [tasks][query_heads][D], and the highest score and the sum of
// weights go to softened [tasks][query_heads].
template <typename T, typename KV, int D, Rows kind>
[[kernel, max_total_threads_per_threadgroup(kDecodeThreads)]] void decode_split(
    const device T* queries [[buffer(0)]],
    const device DecodeTask* tasks [[buffer(1)]],
    const device RowEntry* rows [[buffer(2)]],
    const device ulong* pages [[buffer(3)]],
    device uchar* arena [[buffer(4)]],
    device float* sums [[buffer(5)]],
    device float2* softened [[buffer(6)]],
    device T* out [[buffer(7)]],
    constant AttentionArguments& arguments [[buffer(8)]],
    const device float* sinks [[buffer(9)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Share = RowShare<D>;
  threadgroup float4 scores[kSplitTokens];
  threadgroup float4 shared_softened[2 * kDecodeSimdgroups];
  threadgroup float4 shared_sums[kDecodeSimdgroups / 2 * D];

  const DecodeTask task = tasks[group.y];
  const Split split = split_of(task, rows, arguments, group.x);
  const RowSpace space = {pages, arena};
  const ulong first_query = ulong(task.row) * arguments.query_heads + split.head;
  score_tokens<T, KV, D, kind>(
      queries + first_query * D, space, split, arguments, simdgroup, lane,
      reinterpret_cast<threadgroup float*>(scores));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Softened soft =
      soften(split.tokens, thread_index, simdgroup, lane, scores, shared_softened);

  float4 sum[Share::kNumbers];
  weigh_values<KV, D, kind>(space, split, arguments.place, simdgroup, lane, scores, sum);
  add_simdgroups<Share::kNumbers>(simdgroup, lane, shared_sums, sum);

  const ulong first_result = ulong(group.y) * arguments.query_heads + split.head;
  QUIRE_UNROLL
  for (uint h = 0; h < kTileHeads; ++h) {
    if (simdgroup != 0 || h >= split.heads) {
      continue;
    }
    device T* result = out + (first_query + h) * D;
    device float* part = sums + (first_result + h) * D;
    float total = soft.total[h];
    float factor = 1.0f;
    if (split.is_whole && arguments.sinks != 0) {
      const float sink = sinks[split.head + h];
      const float highest = max(soft.highest[h], sink);
      factor = precise::exp(soft.highest[h] - highest);
      total = fma(total, factor, precise::exp(sink - highest));
    }
    QUIRE_UNROLL
    for (uint i = 0; i < Share::kNumbers; ++i) {
      const uint piece = i / Share::kWidth;
      const uint dim = (piece * 32 + lane) * Share::kWidth + i % Share::kWidth;
      if (split.is_whole) {
        result[dim] = static_cast<T>(sum[i][h] * factor / total);
      } else {
        part[dim] = sum[i][h];
      }
    }
    if (lane == 0 && !split.is_whole) {
      softened[first_result + h] = float2(soft.highest[h], soft.total[h]);
    }
  }
}
