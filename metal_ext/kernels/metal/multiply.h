// Products of a few rows with a matrix, in the formats in which models are stored. A row's sums do
// not depend on the other rows: a lane adds numbers in an order that is the same for any number of
// rows, and so do the lanes of a simdgroup. The memory of a matrix is read as in MLX's product of
// one row: a simdgroup computes kOutputs outputs, and its lanes read adjacent codes.
#pragma once

#include "rows.h"

constant constexpr uint kNumbers = 16;  // numbers of a row that a lane multiplies at a time
constant constexpr uint kOutputs = 4;   // outputs that a simdgroup computes

// A matrix [outputs][inputs], or a stack of them, as it lies in memory. Plain numbers have neither
// scales nor biases, and MXFP4 has no biases.
template <typename T>
struct Matrix {
  const device uchar* codes;
  const device uchar* scales;
  const device T* biases;
};

// Loads and decodes the numbers of one format. `Codes` holds kNumbers codes. A number is
// scale * value(codes, i) + bias.
template <typename T, Packing packing>
struct Format;

template <typename T>
struct Format<T, Packing::affine4> {
  static constant constexpr uint kBits = 4;
  typedef uint2 Codes;
  static inline Codes codes(const device uchar* at) {
    return *reinterpret_cast<const device uint2*>(at);
  }
  static inline float value(Codes codes, uint i) {
    return float(codes[i / 8] >> (i % 8 * 4) & 15u);
  }
  static inline float scale(Matrix<T> matrix, ulong group) {
    return float(reinterpret_cast<const device T*>(matrix.scales)[group]);
  }
  static inline float bias(Matrix<T> matrix, ulong group) { return float(matrix.biases[group]); }
};

template <typename T>
struct Format<T, Packing::affine8> {
  static constant constexpr uint kBits = 8;
  typedef uint4 Codes;
  static inline Codes codes(const device uchar* at) {
    return *reinterpret_cast<const device uint4*>(at);
  }
  static inline float value(Codes codes, uint i) {
    return float(codes[i / 4] >> (i % 4 * 8) & 255u);
  }
  static inline float scale(Matrix<T> matrix, ulong group) {
    return float(reinterpret_cast<const device T*>(matrix.scales)[group]);
  }
  static inline float bias(Matrix<T> matrix, ulong group) { return float(matrix.biases[group]); }
};

// Four-bit floats (sign, two bits of exponent, one of mantissa), and scales that are powers of two.
template <typename T>
struct Format<T, Packing::mxfp4> {
  static constant constexpr uint kBits = 4;
  typedef uint2 Codes;
  static inline Codes codes(const device uchar* at) {
    return *reinterpret_cast<const device uint2*>(at);
  }
  static inline float value(Codes codes, uint i) {
    const uint code = codes[i / 8] >> (i % 8 * 4);
    // As a half with these bits, the number is 2^-14 times as large, which the scale makes good.
    return float(as_type<half>(ushort((code & 7u) << 9 | (code & 8u) << 12)));
  }
  static inline float scale(Matrix<T> matrix, ulong group) {
    return as_type<float>(uint(matrix.scales[group]) << 23) * 16384.0f;
  }
  static inline float bias(Matrix<T>, ulong) { return 0.0f; }
};

// Numbers of 16 bits, or of 32 with activations in float32.
template <typename T>
struct Format<T, Packing::plain> {
  static constant constexpr uint kBits = sizeof(T) * 8;
  struct Codes {
    vec<T, 4> numbers[kNumbers / 4];
  };
  static inline Codes codes(const device uchar* at) {
    Codes codes;
    QUIRE_UNROLL
    for (uint i = 0; i < kNumbers / 4; ++i) {
      codes.numbers[i] = load<4>(reinterpret_cast<const device T*>(at) + i * 4);
    }
    return codes;
  }
  static inline float value(Codes codes, uint i) { return float(codes.numbers[i / 4][i % 4]); }
  static inline float scale(Matrix<T>, ulong) { return 1.0f; }
  static inline float bias(Matrix<T>, ulong) { return 0.0f; }
};

// Computes kOutputs / matrices outputs of each of one or two matrices, from output `first` on, for R
// rows of x. rows[r] is the number of a row. `left` is the number of outputs from `first` on: those
// behind the last repeat it, as memory behind a matrix may not be mapped. All lanes get the sums
// [R][kOutputs]. `inputs` is a multiple of kNumbers, and so is a group of 1 << group_shift numbers.
template <typename T, Packing packing, uint R, uint matrices>
inline void multiply_tile(
    const device T* x, const thread uint* rows, Matrix<T> one, Matrix<T> two, ulong first,
    uint left, uint inputs, uint group_shift, uint lane, thread float* sums) {
  typedef Format<T, packing> F;
  QUIRE_UNROLL
  for (uint i = 0; i < R * kOutputs; ++i) {
    sums[i] = 0.0f;
  }
  for (uint k = lane * kNumbers; k < inputs; k += 32 * kNumbers) {
    typename F::Codes codes[kOutputs];
    float scales[kOutputs];
    float biases[kOutputs];
    QUIRE_UNROLL
    for (uint o = 0; o < kOutputs; ++o) {
      const Matrix<T> matrix = o < kOutputs / matrices ? one : two;
      const ulong output = first + min(o % (kOutputs / matrices), left - 1);
      codes[o] = F::codes(matrix.codes + (output * inputs + k) / 8 * F::kBits);
      const ulong group = output * (inputs >> group_shift) + (k >> group_shift);
      scales[o] = F::scale(matrix, group);
      biases[o] = F::bias(matrix, group);
    }
    float parts[R * kOutputs];
    float totals[R];
    QUIRE_UNROLL
    for (uint i = 0; i < R * kOutputs; ++i) {
      parts[i] = 0.0f;
    }
    QUIRE_UNROLL
    for (uint r = 0; r < R; ++r) {
      totals[r] = 0.0f;
    }
    QUIRE_UNROLL
    for (uint i = 0; i < kNumbers; i += 4) {
      vec<T, 4> numbers[R];
      QUIRE_UNROLL
      for (uint r = 0; r < R; ++r) {
        numbers[r] = load<4>(x + ulong(rows[r]) * inputs + k + i);
      }
      QUIRE_UNROLL
      for (uint j = 0; j < 4; ++j) {
        QUIRE_UNROLL
        for (uint r = 0; r < R; ++r) {
          totals[r] += float(numbers[r][j]);
        }
        QUIRE_UNROLL
        for (uint o = 0; o < kOutputs; ++o) {
          const float value = F::value(codes[o], i + j);
          QUIRE_UNROLL
          for (uint r = 0; r < R; ++r) {
            parts[r * kOutputs + o] = fma(float(numbers[r][j]), value, parts[r * kOutputs + o]);
          }
        }
      }
    }
    QUIRE_UNROLL
    for (uint r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (uint o = 0; o < kOutputs; ++o) {
        const uint i = r * kOutputs + o;
        sums[i] = fma(totals[r], biases[o], fma(parts[i], scales[o], sums[i]));
      }
    }
  }
  QUIRE_UNROLL
  for (uint i = 0; i < R * kOutputs; ++i) {
    sums[i] = simd_sum(sums[i]);
  }
}
