// Chooses the experts of each row, and sorts the pairs of a row and an expert by expert, so that
// the weights of an expert are read once for several rows.
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
  threadgroup uint begun[kRouteThreads];  // number of tiles that begin at a thread's pairs
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
      share = arguments.normalised != 0 ? share / sum : share;
      weights[row * chosen + lane] = total != total ? total : share;  // of NaN logits
    }
  }

  // Sorts them in a bitonic network, behind which there are keys of no pair.
  const uint pairs = arguments.rows * chosen;
  uint padded = 2;
  while (padded < pairs) {
    padded *= 2;
  }
  for (uint at = pairs + thread_index; at < padded; at += kRouteThreads) {
    keys[at] = ~0u;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint run = 2; run <= padded; run *= 2) {
    for (uint apart = run / 2; apart > 0; apart /= 2) {
      for (uint i = thread_index; i < padded / 2; i += kRouteThreads) {
        const uint at = 2 * i - (i & (apart - 1));
        const uint low = min(keys[at], keys[at + apart]);
        const uint high = max(keys[at], keys[at + apart]);
        const bool ascends = (at & run) == 0;
        keys[at] = ascends ? low : high;
        keys[at + apart] = ascends ? high : low;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  // A thread takes up to kOwn pairs that follow each other.
  constexpr uint kOwn = kMaxPairs / kRouteThreads;
  const uint own = (pairs + kRouteThreads - 1) / kRouteThreads;
  const uint first_own = thread_index * own;
  bool begins[kOwn];  // whether a tile begins at the pair
  uint count = 0;
  QUIRE_UNROLL
  for (uint i = 0; i < kOwn; ++i) {
    const uint at = first_own + i;
    begins[i] = false;
    if (i < own && at < pairs) {
      order[at] = keys[at] % kMaxPairs;
      const uint least = keys[at] / kMaxPairs * kMaxPairs;  // of the expert's keys
      uint first = 0;                                       // place of the expert's first pair
      for (uint step = padded / 2; step > 0; step /= 2) {
        first += keys[first + step - 1] < least ? step : 0;
      }
      begins[i] = (at - first) % kTileRows == 0;
      count += begins[i] ? 1 : 0;
    }
  }
  begun[thread_index] = count;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint shared_pairs = arguments.shared != 0 ? arguments.rows : 0;
  const uint shared_tiles = (shared_pairs + kTileRows - 1) / kTileRows;
  uint tile = shared_tiles;
  uint used = shared_tiles;
  for (uint other = 0; other * own < pairs; ++other) {
    tile += other < thread_index ? begun[other] : 0;
    used += begun[other];
  }
  QUIRE_UNROLL
  for (uint i = 0; i < kOwn; ++i) {
    const uint first = first_own + i;
    if (begins[i]) {
      const uint expert = keys[first] / kMaxPairs;
      uint end = first + 1;
      while (end < min(first + kTileRows, pairs) && keys[end] / kMaxPairs == expert) {
        ++end;
      }
      tiles[tile] = {expert, first, end - first, 0};
      ++tile;
    }
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
