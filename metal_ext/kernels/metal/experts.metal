// The MLPs of a mixture's experts, for pairs of a row and an expert (route.metal). Each command
// reads the weights of an expert once for a tile of pairs. Outputs fill whole tiles, because they
// are the inputs of another matrix (multiply_tile).
#include "gate.h"
#include "multiply.h"

// Writes outputs of a tile of R pairs at most: those of one matrix (down), or what the gate makes
// of those of two. A tile with fewer pairs repeats the last one. `expert` is the first output of an
// expert in its stack.
template <Packing packing, uint R, uint matrices, typename T, typename Out>
inline void multiply_pairs(
    const device T* x, const device uint* order, ExpertTile tile, Matrix<T> one, Matrix<T> two,
    uint expert, const device T* added_one, const device T* added_two, device Out* out,
    constant ExpertArguments& arguments, uint first, uint lane) {
  constexpr uint kEach = kOutputs / matrices;
  uint pairs[R];
  uint rows[R];
  QUIRE_UNROLL
  for (uint i = 0; i < R; ++i) {
    const uint pair = order[tile.first + min(i, tile.count - 1)];
    pairs[i] = pair;
    rows[i] = pair < arguments.pairs ? pair / arguments.chosen : pair - arguments.pairs;
  }
  float sums[R * kOutputs];
  multiply_tile<T, packing, R, matrices>(
      x, matrices == 1 ? pairs : rows, one, two, expert + first, arguments.outputs - first,
      arguments.inputs, arguments.group_shift, lane, sums);
  QUIRE_UNROLL
  for (uint i = 0; i < R; ++i) {
    QUIRE_UNROLL
    for (uint o = 0; o < kEach; ++o) {
      if (lane == 0 && i < tile.count) {
        Out y = static_cast<Out>(sums[i * kOutputs + o]);
        Out u = static_cast<Out>(sums[(i + 1) * kOutputs - kEach + o]);
        if (arguments.added != 0) {
          const ulong at = expert + first + o;
          y = static_cast<Out>(float(y) + float(added_one[at]));
          u = static_cast<Out>(float(u) + float(added_two[at]));
        }
        if (matrices == 2) {
          y = static_cast<Out>(gated(arguments.gate, float(y), float(u)));
        }
        out[ulong(pairs[i]) * arguments.outputs + first + o] = y;
      }
    }
  }
}

template <Packing packing, uint most, uint matrices, typename T, typename Out>
inline void multiply_tile_of_pairs(
    const device T* x, const device uint* order, ExpertTile tile, Matrix<T> one, Matrix<T> two,
    uint expert, const device T* added_one, const device T* added_two, device Out* out,
    constant ExpertArguments& arguments, uint first, uint lane) {
  if (tile.count == 1) {
    multiply_pairs<packing, 1, matrices>(
        x, order, tile, one, two, expert, added_one, added_two, out, arguments, first, lane);
  } else if (most > 1 && tile.count == 2) {
    multiply_pairs<packing, 2, matrices>(
        x, order, tile, one, two, expert, added_one, added_two, out, arguments, first, lane);
  } else if (most > 1) {
    multiply_pairs<packing, most, matrices>(
        x, order, tile, one, two, expert, added_one, added_two, out, arguments, first, lane);
  }
}

// Writes what the gate makes of each pair's products with its expert's gate and up (gated). Runs on
// (tiles of pairs, tiles of kGateOutputs outputs) threadgroups of kProductThreads, so that tiles of
// one expert read the same weights one after the other. x is [rows][inputs], out [pairs][outputs],
// and also has the shared expert's pairs. `most` is the largest number of pairs in a tile.
template <typename T, Packing packing, uint most>
[[kernel, max_total_threads_per_threadgroup(kProductThreads)]] void expert_gates(
    const device T* x [[buffer(0)]],
    const device uint* order [[buffer(1)]],
    const device ExpertTile* tiles [[buffer(2)]],
    const device uchar* gate_codes [[buffer(3)]],
    const device uchar* gate_scales [[buffer(4)]],
    const device T* gate_biases [[buffer(5)]],
    const device uchar* up_codes [[buffer(6)]],
    const device uchar* up_scales [[buffer(7)]],
    const device T* up_biases [[buffer(8)]],
    const device uchar* shared_gate_codes [[buffer(9)]],
    const device uchar* shared_gate_scales [[buffer(10)]],
    const device T* shared_gate_biases [[buffer(11)]],
    const device uchar* shared_up_codes [[buffer(12)]],
    const device uchar* shared_up_scales [[buffer(13)]],
    const device T* shared_up_biases [[buffer(14)]],
    const device T* gate_added [[buffer(15)]],
    const device T* up_added [[buffer(16)]],
    device T* out [[buffer(17)]],
    constant ExpertArguments& arguments [[buffer(18)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const ExpertTile tile = tiles[group.x];
  const uint first = group.y * kGateOutputs + simdgroup * kOutputs / 2;
  if (tile.count == 0) {
    return;
  }
  const Matrix<T> gates = {gate_codes, gate_scales, gate_biases};
  const Matrix<T> ups = {up_codes, up_scales, up_biases};
  const Matrix<T> shared_gate = {shared_gate_codes, shared_gate_scales, shared_gate_biases};
  const Matrix<T> shared_up = {shared_up_codes, shared_up_scales, shared_up_biases};
  // Each branch has pointers that are the same in all threadgroups, so that they take no registers.
  if (tile.expert == arguments.experts) {
    multiply_tile_of_pairs<packing, most, 2>(
        x, order, tile, shared_gate, shared_up, 0, gate_added, up_added, out, arguments, first,
        lane);
  } else {
    multiply_tile_of_pairs<packing, most, 2>(
        x, order, tile, gates, ups, tile.expert * arguments.stride, gate_added, up_added, out,
        arguments, first, lane);
  }
}

// Writes each pair's product with its expert's down-projection. x is the output of expert_gates,
// out is [pairs][outputs]. Runs like expert_gates, on tiles of kProductOutputs outputs.
template <typename T, Packing packing, uint most>
[[kernel, max_total_threads_per_threadgroup(kProductThreads)]] void expert_downs(
    const device T* x [[buffer(0)]],
    const device uint* order [[buffer(1)]],
    const device ExpertTile* tiles [[buffer(2)]],
    const device uchar* codes [[buffer(3)]],
    const device uchar* scales [[buffer(4)]],
    const device T* biases [[buffer(5)]],
    const device uchar* shared_codes [[buffer(6)]],
    const device uchar* shared_scales [[buffer(7)]],
    const device T* shared_biases [[buffer(8)]],
    const device T* added [[buffer(9)]],
    device float* out [[buffer(10)]],
    constant ExpertArguments& arguments [[buffer(11)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const ExpertTile tile = tiles[group.x];
  const uint first = group.y * kProductOutputs + simdgroup * kOutputs;
  if (tile.count == 0) {
    return;
  }
  const Matrix<T> stack = {codes, scales, biases};
  const Matrix<T> shared = {shared_codes, shared_scales, shared_biases};
  if (tile.expert == arguments.experts) {
    multiply_tile_of_pairs<packing, most, 1>(
        x, order, tile, shared, shared, 0, added, added, out, arguments, first, lane);
  } else {
    multiply_tile_of_pairs<packing, most, 1>(
        x, order, tile, stack, stack, tile.expert * arguments.stride, added, added, out, arguments,
        first, lane);
  }
}

// Adds a row's outputs of experts by weight, and those of the shared expert by its gate, to the
// residual. products is [pairs][hidden], weights [rows][chosen], shared_gate [rows]. Runs on
// (hidden / 4, rows) threads.
template <typename T>
[[kernel]] void mix(
    const device float* products [[buffer(0)]],
    const device float* weights [[buffer(1)]],
    const device T* shared_gate [[buffer(2)]],
    const device T* residual [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant MixArguments& arguments [[buffer(5)]],
    uint2 at [[thread_position_in_grid]]) {
  const uint element = at.x * 4;
  const uint hidden = arguments.hidden;
  float4 sum = float4(0.0f);
  for (uint c = 0; c < arguments.chosen; ++c) {
    const uint pair = at.y * arguments.chosen + c;
    sum = fma(float4(weights[pair]), load<4>(products + ulong(pair) * hidden + element), sum);
  }
  if (arguments.shared != 0) {
    const uint pair = arguments.rows * arguments.chosen + at.y;
    const float4 y = load<4>(products + ulong(pair) * hidden + element);
    sum = fma(float4(sigmoid(float(shared_gate[at.y]))), y, sum);
  }
  const ulong first = ulong(at.y) * hidden + element;
  QUIRE_UNROLL
  for (uint i = 0; i < 4; ++i) {
    const float y = float(static_cast<T>(sum[i]));
    out[first + i] = static_cast<T>(float(residual[first + i]) + y);
  }
}
