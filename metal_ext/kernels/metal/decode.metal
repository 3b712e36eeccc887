// Softmax attention of single rows (tokens). A row attends to the positions that it sees, up to its
// own. They are cut into splits. A threadgroup of decode_split computes one split for a tile of up
// to H query heads that share a KV head, so that K and V are read once for all of them. What it
// computes for a head depends neither on H nor on the others. combine.metal combines the splits.
#include "rows.h"

constant constexpr uint kDecodeSimdgroups = kDecodeThreads / 32;
// A lane loads this many rows of K before it uses the first, so that memory stays busy.
constant constexpr uint kKeysAhead = 2;

// The numbers of a tile's heads, one for each, lie side by side in kParts vectors.
template <int H>
struct TileShare {
  static constant constexpr uint kWidth = H % 4 == 0 ? 4 : 2;
  static constant constexpr uint kParts = H / kWidth;
  using Part = vec<float, kWidth>;
};

// A split (run of positions) of one row's keys, for a tile of query heads that share a KV head.
struct Split {
  RowEntry row;
  uint first;    // first position
  uint tokens;   // number of tokens, 1 to kSplitTokens
  uint kv_head;
  uint head;     // the tile's first query head
  uint heads;    // number of heads, 1 to H
  bool is_whole;  // whether it is the row's only one
};

template <int H>
inline Split split_of(
    DecodeTask task, const device RowEntry* rows, constant AttentionArguments& arguments,
    uint tile_of_all) {
  const uint group = arguments.query_heads / arguments.kv_heads;
  const uint tiles = (group + H - 1) / H;
  const uint in_group = tile_of_all % tiles * H;
  const uint kv_head = tile_of_all / tiles;
  const RowEntry row = rows[arguments.first_row + task.row];
  const uint begin = first_seen(row.position, arguments.window);
  const uint most = split_tokens(row.position - begin);
  const uint first = begin + task.split * most;
  const uint tokens = min(most, row.position + 1 - first);
  const uint heads = min(uint(H), group - in_group);
  const bool is_whole = split_count(row.position - begin) == 1;
  return {row, first, tokens, kv_head, kv_head * group + in_group, heads, is_whole};
}

// Adds n heads' sums of two lanes, `apart` from each other. The first lane keeps the sums of the
// first half of the heads, the second those of the others. If n is odd, both keep the middle one.
template <uint n>
inline void halve(bool is_second, ushort apart, thread float* sums) {
  constexpr uint kKept = (n + 1) / 2;
  QUIRE_UNROLL
  for (uint i = 0; i < kKept; ++i) {
    const float early = sums[i];
    const float late = sums[i + kKept < n ? i + kKept : i];
    sums[i] = (is_second ? late : early) + simd_shuffle_xor(is_second ? early : late, apart);
  }
}

// Adds the scores of `lanes` (at least 8) neighbouring lanes for n heads, 3 or 4. This lane is
// number `part` of them, and returns the sum for the head head_of_part(part).
template <uint n>
inline float add_lanes(thread float* scores, uint part, uint lanes) {
  halve<n>((part & 1) != 0, 1, scores);
  halve<2>((part & 2) != 0, 2, scores);
  float sum = scores[0];
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
template <typename T, typename KV, int D, int H, Rows kind>
inline void score_tokens(
    const device T* queries, RowSpace space, Split split, constant AttentionArguments& arguments,
    uint simdgroup, uint lane, threadgroup float* scores) {
  // D / 8 lanes share a token; each takes four numbers from each half of the key. Lanes read
  // adjacent memory, and adding up a token's lanes takes few steps. Four heads are the most for
  // which a lane has registers: in larger tiles, other lanes read the same key for the other half.
  constexpr uint kTokenLanes = D / 8;
  constexpr uint kShares = H > 4 ? 2 : 1;
  constexpr uint kHeads = H / kShares;
  constexpr uint kRuns = 32 / kTokenLanes;
  const uint run = simdgroup * kRuns + lane / kTokenLanes;
  const uint first_head = run % kShares * kHeads;
  const uint part = lane % kTokenLanes;
  const uint head = head_of_part(part);
  const uint low = part * 4;
  const uint high = D / 2 + low;

  float query[8][kHeads];
  QUIRE_UNROLL
  for (uint h = 0; h < kHeads; ++h) {
    float4 lows = float4(0.0f);
    float4 highs = float4(0.0f);
    if (first_head + h < split.heads) {
      const device T* its = queries + (first_head + h) * D;
      lows = as_floats<4, T>(load<4>(its + low));
      highs = as_floats<4, T>(load<4>(its + high));
    }
    QUIRE_UNROLL
    for (uint i = 0; i < 4; ++i) {
      query[i][h] = lows[i] * arguments.scale;
      query[4 + i][h] = highs[i] * arguments.scale;
    }
  }
  constant LayerPlace& place = arguments.place;
  constexpr uint kStep = kDecodeSimdgroups * kRuns / kShares;
  const uint ahead = run / kShares - simdgroup * kRuns / kShares;
  for (uint start = simdgroup * kRuns / kShares; start < split.tokens;
       start += kKeysAhead * kStep) {
    const uint first = start + ahead;
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
      const float4 low_key = as_floats<4, KV>(lows[i]);
      const float4 high_key = as_floats<4, KV>(highs[i]);
      float score[kHeads];
      QUIRE_UNROLL
      for (uint h = 0; h < kHeads; ++h) {
        score[h] = 0.0f;
        QUIRE_UNROLL
        for (uint dim = 0; dim < 4; ++dim) {
          score[h] = fma(query[dim][h], low_key[dim], score[h]);
          score[h] = fma(query[4 + dim][h], high_key[dim], score[h]);
        }
      }
      const uint token = first + i * kStep;
      const float sum = add_lanes<kHeads>(score, part, kTokenLanes);
      if (part < 4 && head < kHeads && token < split.tokens) {
        scores[token * H + first_head + head] = capped(sum, arguments.softcap);
      }
    }
  }
}

// What all simdgroups know of some heads' scores: the largest of all, and the sum of all weights.
template <typename Part>
inline Part highest_of(const threadgroup Part* highest, uint parts) {
  Part result = highest[0];
  for (uint i = 1; i < kDecodeSimdgroups; ++i) {
    result = max(result, highest[i * parts]);
  }
  return result;
}

template <typename Part>
inline Part total_of(const threadgroup Part* totals, uint parts) {
  Part result = totals[0];
  for (uint i = 1; i < kDecodeSimdgroups; ++i) {
    result += totals[i * parts];
  }
  return result;
}

// Turns scores into weights, exp(score - highest). highest and totals are
// [kDecodeSimdgroups][kParts].
template <typename Part, uint kParts>
inline void soften(
    uint tokens, uint thread_index, uint simdgroup, uint lane, threadgroup Part* scores,
    threadgroup Part* highest, threadgroup Part* totals) {
  constexpr uint kWidth = sizeof(Part) / sizeof(float);
  QUIRE_UNROLL
  for (uint part = 0; part < kParts; ++part) {
    Part most = Part(-INFINITY);
    for (uint token = thread_index; token < tokens; token += kDecodeThreads) {
      most = max(most, scores[token * kParts + part]);
    }
    QUIRE_UNROLL
    for (uint i = 0; i < kWidth; ++i) {
      most[i] = simd_max(most[i]);
    }
    if (lane == 0) {
      highest[simdgroup * kParts + part] = most;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  QUIRE_UNROLL
  for (uint part = 0; part < kParts; ++part) {
    const Part most = highest_of(highest + part, kParts);
    Part total = Part(0.0f);
    for (uint token = thread_index; token < tokens; token += kDecodeThreads) {
      Part weight = scores[token * kParts + part] - most;
      QUIRE_UNROLL
      for (uint i = 0; i < kWidth; ++i) {
        weight[i] = precise::exp(weight[i]);
      }
      scores[token * kParts + part] = weight;
      total += weight;
    }
    QUIRE_UNROLL
    for (uint i = 0; i < kWidth; ++i) {
      total[i] = simd_sum(total[i]);
    }
    if (lane == 0) {
      totals[simdgroup * kParts + part] = total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The numbers of a head that one lane computes: kPieces pieces of kWidth adjacent numbers.
template <int D>
struct RowShare {
  static constant constexpr uint kNumbers = D / 32;
  static constant constexpr uint kWidth = kNumbers < 4 ? kNumbers : 4;
  static constant constexpr uint kPieces = kNumbers / kWidth;
  using Piece = vec<float, kWidth>;
};

// Computes a simdgroup's part of the weighted sums of values: every kDecodeSimdgroups-th token.
// sum is [H][kPieces].
template <typename KV, int D, int H, Rows kind>
inline void weigh_values(
    RowSpace space, Split split, constant LayerPlace& place, uint simdgroup, uint lane,
    const threadgroup typename TileShare<H>::Part* weights,
    thread typename RowShare<D>::Piece* sum) {
  using Part = typename TileShare<H>::Part;
  using Piece = typename RowShare<D>::Piece;
  constexpr uint kParts = TileShare<H>::kParts;
  constexpr uint kWidth = RowShare<D>::kWidth;
  constexpr uint kPieces = RowShare<D>::kPieces;
  // A lane loads this many rows before it uses the first: fewer beside many sums, so that a core
  // has registers for two threadgroups.
  constexpr uint kValuesAhead = H * D < 2048 ? 4 : 2;
  QUIRE_UNROLL
  for (uint i = 0; i < H * kPieces; ++i) {
    sum[i] = Piece(0.0f);
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
      if (token >= split.tokens) {
        continue;
      }
      QUIRE_UNROLL
      for (uint h = 0; h < H; ++h) {
        const Part weight = weights[token * kParts + h / TileShare<H>::kWidth];
        QUIRE_UNROLL
        for (uint piece = 0; piece < kPieces; ++piece) {
          sum[h * kPieces + piece] =
              fma(Piece(weight[h % TileShare<H>::kWidth]),
                  as_floats<kWidth, KV>(numbers[i][piece]), sum[h * kPieces + piece]);
        }
      }
    }
  }
}

// Adds the sums of all simdgroups in pairs; simdgroup 0 gets the result. shared has
// kDecodeSimdgroups / 2 * kPieces * 32 elements.
template <typename Piece, uint kPieces>
inline void add_simdgroups(
    uint simdgroup, uint lane, threadgroup Piece* shared, thread Piece* sum) {
  for (uint receivers = kDecodeSimdgroups / 2; receivers > 0; receivers /= 2) {
    threadgroup Piece* place = shared + simdgroup % receivers * kPieces * 32 + lane;
    if (simdgroup >= receivers && simdgroup < 2 * receivers) {
      QUIRE_UNROLL
      for (uint i = 0; i < kPieces; ++i) {
        place[i * 32] = sum[i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup < receivers) {
      QUIRE_UNROLL
      for (uint i = 0; i < kPieces; ++i) {
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
template <typename T, typename KV, int D, int H, Rows kind>
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
  using Part = typename TileShare<H>::Part;
  using Piece = typename RowShare<D>::Piece;
  constexpr uint kWidth = TileShare<H>::kWidth;
  constexpr uint kParts = TileShare<H>::kParts;
  constexpr uint kPieces = RowShare<D>::kPieces;
  // Threadgroup memory has room for the sums of four heads of 256 numbers at a time.
  constexpr uint kTurns = H > 4 ? 2 : 1;
  constexpr uint kTurnPieces = H / kTurns * kPieces;
  threadgroup Part scores[kSplitTokens * kParts];
  threadgroup Part highest[kDecodeSimdgroups * kParts];
  threadgroup Part totals[kDecodeSimdgroups * kParts];
  threadgroup Piece shared_sums[kDecodeSimdgroups / 2 * kTurnPieces * 32];

  const DecodeTask task = tasks[group.y];
  const Split split = split_of<H>(task, rows, arguments, group.x);
  const RowSpace space = {pages, arena};
  const ulong first_query = ulong(task.row) * arguments.query_heads + split.head;
  score_tokens<T, KV, D, H, kind>(
      queries + first_query * D, space, split, arguments, simdgroup, lane,
      reinterpret_cast<threadgroup float*>(scores));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  soften<Part, kParts>(split.tokens, thread_index, simdgroup, lane, scores, highest, totals);

  Piece sum[H * kPieces];
  weigh_values<KV, D, H, kind>(space, split, arguments.place, simdgroup, lane, scores, sum);
  QUIRE_UNROLL
  for (uint turn = 0; turn < kTurns; ++turn) {
    add_simdgroups<Piece, kTurnPieces>(simdgroup, lane, shared_sums, sum + turn * kTurnPieces);
  }

  const ulong first_result = ulong(group.y) * arguments.query_heads + split.head;
  QUIRE_UNROLL
  for (uint h = 0; h < H; ++h) {
    if (simdgroup != 0 || h >= split.heads) {
      continue;
    }
    const uint in_part = h / kWidth;
    const float most = highest_of(highest + in_part, kParts)[h % kWidth];
    const float all_weights = total_of(totals + in_part, kParts)[h % kWidth];
    device T* result = out + (first_query + h) * D;
    device float* part = sums + (first_result + h) * D;
    float total = all_weights;
    float factor = 1.0f;
    if (split.is_whole && arguments.sinks != 0) {
      const float sink = sinks[split.head + h];
      const float larger = max(most, sink);
      factor = precise::exp(most - larger);
      total = fma(total, factor, precise::exp(sink - larger));
    }
    QUIRE_UNROLL
    for (uint piece = 0; piece < kPieces; ++piece) {
      const uint dim = (piece * 32 + lane) * RowShare<D>::kWidth;
      const Piece numbers = sum[h * kPieces + piece];
      if (split.is_whole) {
        store<RowShare<D>::kWidth>(result + dim, numbers * Piece(factor) / Piece(total));
      } else {
        store<RowShare<D>::kWidth>(part + dim, numbers);
      }
    }
    if (lane == 0 && !split.is_whole) {
      softened[first_result + h] = float2(most, all_weights);
    }
  }
}
