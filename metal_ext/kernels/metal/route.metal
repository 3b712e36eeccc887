// Chooses the experts of each row, and sorts the pairs of a row and an expert by expert, so that the
// weights of an expert are read once for several rows.
#include "rows.h"

constant constexpr uint kLaneExperts = kMaxExperts / 32;

// Runs in one threadgroup of kRouteThreads; a simdgroup computes a row at a time. logits is
// [rows][experts]. The shares (softmax) are rounded to T before they are compared, as in mlx-lm; of
// equal ones the expert with the lower number is chosen. A pair of row r and its c-th best expert
// has the number r * chosen + c. Behind all pairs, row r has a pair with the shared expert.
//   weights  [rows][chosen]
//   order    the numbers of pairs by expert
//   tiles    runs of at most kTileRows pairs in `order` with the same expert. First come those of
//            the shared expert, whose number is `experts`. Tiles without a pair are at the end.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kRouteThreads)]] void route(
    const device T* logits [[buffer(0)]],
    device float* weights [[buffer(1)]],
    device uint* order [[buffer(2)]],
    device ExpertTile* tiles [[buffer(3)]],
    constant RouteArguments& arguments [[buffer(4)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint keys[kMaxPairs];  // expert * kMaxPairs + number of the pair
  threadgroup uint ranks[kMaxPairs];
  threadgroup uint counts[kMaxPairs];  // the tile's pairs, at the first of them; else 0
  const uint experts = arguments.experts;
  const uint chosen = arguments.chosen;

  for (uint row = simdgroup; row < arguments.rows; row += kRouteThreads / 32) {
    float shares[kLaneExperts];
    float highest = -INFINITY;
    QUIRE_UNROLL
    for (uint i = 0; i < kLaneExperts; ++i) {
      const uint expert = i * 32 + lane;
      shares[i] = expert < experts ? float(logits[ulong(row) * experts + expert]) : -INFINITY;
      highest = max(highest, shares[i]);
    }
    highest = simd_max(highest);
    float total = 0.0f;
    QUIRE_UNROLL
    for (uint i = 0; i < kLaneExperts; ++i) {
      shares[i] = precise::exp(shares[i] - highest);
      total += shares[i];
    }
    total = simd_sum(total);
    QUIRE_UNROLL
    for (uint i = 0; i < kLaneExperts; ++i) {
      const bool is_expert = i * 32 + lane < experts;
      shares[i] = is_expert ? float(static_cast<T>(shares[i] / total)) : -1.0f;
    }

    float share = 0.0f;  // of the expert that is this lane's number among the chosen
    float sum = 0.0f;
    for (uint c = 0; c < chosen; ++c) {
      float best = -1.0f;
      uint best_expert = experts - 1;  // also if logits are NaN
      QUIRE_UNROLL
      for (uint i = 0; i < kLaneExperts; ++i) {
        if (shares[i] > best) {
          best = shares[i];
          best_expert = i * 32 + lane;
        }
      }
      const float top = simd_max(best);
      const uint expert = simd_min(best == top ? best_expert : experts - 1);
      QUIRE_UNROLL
      for (uint i = 0; i < kLaneExperts; ++i) {
        shares[i] = i * 32 + lane == expert ? -1.0f : shares[i];
      }
      share = lane == c ? top : share;
      sum += top;
      if (lane == 0) {
        keys[row * chosen + c] = expert * kMaxPairs + row * chosen + c;
      }
    }
    if (lane < chosen) {
      weights[row * chosen + lane] = arguments.normalised != 0 ? share / sum : share;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint pairs = arguments.rows * chosen;
  for (uint pair = thread_index; pair < pairs; pair += kRouteThreads) {
    const uint key = keys[pair];
    uint rank = 0;
    uint before = 0;  // earlier pairs with the same expert
    uint all = 0;
    for (uint other = 0; other < pairs; ++other) {
      const bool is_before = keys[other] < key;
      const bool is_same = keys[other] / kMaxPairs == key / kMaxPairs;
      rank += is_before ? 1 : 0;
      before += is_before && is_same ? 1 : 0;
      all += is_same ? 1 : 0;
    }
    order[rank] = pair;
    ranks[pair] = rank;
    counts[pair] = before % kTileRows == 0 ? min(all - before, uint(kTileRows)) : 0;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint shared_pairs = arguments.shared != 0 ? arguments.rows : 0;
  const uint shared_tiles = (shared_pairs + kTileRows - 1) / kTileRows;
  uint used = shared_tiles;
  for (uint other = 0; other < pairs; ++other) {
    used += counts[other] != 0 ? 1 : 0;
  }
  for (uint pair = thread_index; pair < pairs; pair += kRouteThreads) {
    if (counts[pair] == 0) {
      continue;
    }
    uint tile = shared_tiles;
    for (uint other = 0; other < pairs; ++other) {
      tile += counts[other] != 0 && keys[other] < keys[pair] ? 1 : 0;
    }
    tiles[tile] = {keys[pair] / kMaxPairs, ranks[pair], counts[pair], 0};
  }
  for (uint pair = thread_index; pair < shared_pairs; pair += kRouteThreads) {
    order[pairs + pair] = pairs + pair;
  }
  for (uint tile = thread_index; tile < arguments.tiles; tile += kRouteThreads) {
    if (tile < shared_tiles) {
      const uint first = tile * kTileRows;
      tiles[tile] = {experts, pairs + first, min(shared_pairs - first, uint(kTileRows)), 0};
    } else if (tile >= used) {
      tiles[tile] = {0, 0, 0, 0};
    }
  }
}
