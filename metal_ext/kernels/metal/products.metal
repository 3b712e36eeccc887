// Products of a few rows with one to kProductMatrices matrices of the same format, in one command.
#include "gate.h"
#include "multiply.h"

template <typename P>
inline P chosen(uint matrix, P first, P second, P third, P fourth) {
  return matrix == 0 ? first : matrix == 1 ? second : matrix == 2 ? third : fourth;
}

// Sets the numbers of a tile's R rows. A tile with fewer rows repeats the last one.
template <uint R>
inline void rows_of_tile(uint tile, uint rows, thread uint* numbers) {
  QUIRE_UNROLL
  for (uint r = 0; r < R; ++r) {
    numbers[r] = min(tile * R + r, rows - 1);
  }
}

// Runs on (tiles of R rows, tiles of kProductOutputs outputs of all matrices) threadgroups of
// kProductThreads. x is [rows][inputs], out0 [rows][outputs of matrix 0] and so on. `addedN` is the
// bias of a linear layer [outputs], and `residual` [rows][outputs] is added to the only matrix's
// product.
template <typename T, Packing packing, uint R>
[[kernel, max_total_threads_per_threadgroup(kProductThreads)]] void products(
    const device T* x [[buffer(0)]],
    const device uchar* codes0 [[buffer(1)]],
    const device uchar* codes1 [[buffer(2)]],
    const device uchar* codes2 [[buffer(3)]],
    const device uchar* codes3 [[buffer(4)]],
    const device uchar* scales0 [[buffer(5)]],
    const device uchar* scales1 [[buffer(6)]],
    const device uchar* scales2 [[buffer(7)]],
    const device uchar* scales3 [[buffer(8)]],
    const device T* biases0 [[buffer(9)]],
    const device T* biases1 [[buffer(10)]],
    const device T* biases2 [[buffer(11)]],
    const device T* biases3 [[buffer(12)]],
    const device T* added0 [[buffer(13)]],
    const device T* added1 [[buffer(14)]],
    const device T* added2 [[buffer(15)]],
    const device T* added3 [[buffer(16)]],
    device T* out0 [[buffer(17)]],
    device T* out1 [[buffer(18)]],
    device T* out2 [[buffer(19)]],
    device T* out3 [[buffer(20)]],
    const device T* residual [[buffer(21)]],
    constant ProductArguments& arguments [[buffer(22)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  uint matrix = 0;
  uint first = group.y * kProductOutputs + simdgroup * kOutputs;
  while (matrix + 1 < arguments.matrices && group.y >= arguments.first_tiles[matrix + 1]) {
    ++matrix;
  }
  first -= arguments.first_tiles[matrix] * kProductOutputs;
  const uint outputs = arguments.outputs[matrix];
  if (first >= outputs) {
    return;
  }
  const Matrix<T> weights = {
      chosen(matrix, codes0, codes1, codes2, codes3),
      chosen(matrix, scales0, scales1, scales2, scales3),
      chosen(matrix, biases0, biases1, biases2, biases3)};
  uint rows[R];
  rows_of_tile<R>(group.x, arguments.rows, rows);
  float sums[R * kOutputs];
  multiply_tile<T, packing, R, 1>(
      x, rows, weights, weights, first, outputs - first, arguments.inputs, arguments.group_shift,
      lane, sums);

  const device T* added = chosen(matrix, added0, added1, added2, added3);
  device T* out = chosen(matrix, out0, out1, out2, out3);
  QUIRE_UNROLL
  for (uint r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (uint o = 0; o < kOutputs; ++o) {
      if (lane == 0 && first + o < outputs && group.x * R + r < arguments.rows) {
        const ulong at = ulong(rows[r]) * outputs + first + o;
        T y = static_cast<T>(sums[r * kOutputs + o]);
        if ((arguments.added >> matrix & 1) != 0) {
          y = static_cast<T>(float(y) + float(added[first + o]));
        }
        if (arguments.residual != 0) {
          y = static_cast<T>(float(residual[at]) + float(y));
        }
        out[at] = y;
      }
    }
  }
}

// Multiplies rows by the matrices of gate and up, which have the same shape, and writes what the
// gate makes of the products (gated). Runs on (tiles of R rows, tiles of kGateOutputs outputs)
// threadgroups.
template <typename T, Packing packing, uint R>
[[kernel, max_total_threads_per_threadgroup(kProductThreads)]] void gated_product(
    const device T* x [[buffer(0)]],
    const device uchar* gate_codes [[buffer(1)]],
    const device uchar* gate_scales [[buffer(2)]],
    const device T* gate_biases [[buffer(3)]],
    const device uchar* up_codes [[buffer(4)]],
    const device uchar* up_scales [[buffer(5)]],
    const device T* up_biases [[buffer(6)]],
    device T* out [[buffer(7)]],
    constant ProductArguments& arguments [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint first = group.y * kGateOutputs + simdgroup * kOutputs / 2;
  const uint outputs = arguments.outputs[0];
  if (first >= outputs) {
    return;
  }
  const Matrix<T> gate = {gate_codes, gate_scales, gate_biases};
  const Matrix<T> up = {up_codes, up_scales, up_biases};
  uint rows[R];
  rows_of_tile<R>(group.x, arguments.rows, rows);
  float sums[R * kOutputs];
  multiply_tile<T, packing, R, 2>(
      x, rows, gate, up, first, outputs - first, arguments.inputs, arguments.group_shift, lane,
      sums);
  QUIRE_UNROLL
  for (uint r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (uint o = 0; o < kOutputs / 2; ++o) {
      if (lane == 0 && first + o < outputs && group.x * R + r < arguments.rows) {
        const float g = float(static_cast<T>(sums[r * kOutputs + o]));
        const float u = float(static_cast<T>(sums[r * kOutputs + kOutputs / 2 + o]));
        out[ulong(rows[r]) * outputs + first + o] = static_cast<T>(gated(arguments.gate, g, u));
      }
    }
  }
}
