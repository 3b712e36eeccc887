// Products of a few rows with a matrix, in the formats in which models are stored. A row's sums do
// not depend on the other rows: a lane adds numbers in an order that is the same for any number of
// rows, and so do the lanes of a simdgroup. The memory of a matrix is read as in MLX's product of
// one row: a simdgroup computes kOutputs outputs, and its lanes read adjacent codes. Indices have
// 32 bits, so that pointers stay as the kernel got them, and take no registers.
#pragma once

#include "rows.h"

constant constexpr uint kOutputs = 4;  // outputs that a simdgroup computes

// A matrix [outputs][inputs], or a stack of them, as it lies in memory. Plain numbers have neither
// scales nor biases, and MXFP4 has no biases.
template <typename T>
struct Matrix {
  const device uchar* codes;
  const device uchar* scales;
  const device T* biases;
};

// Loads and decodes the numbers of one format. `Codes` holds the kNumbers codes that a lane
// multiplies at a time. A number is scale * value(codes, i) + bias.
template <typename T, Packing packing>
struct Format;

// Codes of which a lane multiplies two words at a time.
struct CodeWords {
  typedef uint2 Codes;
  static inline Codes codes(const device uchar* codes, uint place) {
    return reinterpret_cast<const device uint2*>(codes)[place];
  }
};

// Codes whose groups have a scale and a bias.
template <typename T>
struct AffineGroups : CodeWords {
  static inline float scale(Matrix<T> matrix, uint group) {
    return float(reinterpret_cast<const device T*>(matrix.scales)[group]);
  }
  static inline float bias(Matrix<T> matrix, uint group) { return float(matrix.biases[group]); }
};

template <typename T>
struct Format<T, Packing::affine4> : AffineGroups<T> {
  static constant constexpr uint kNumbers = 16;
  static inline float value(uint2 codes, uint i) {
    return float(codes[i / 8] >> (i % 8 * 4) & 15u);
  }
};

template <typename T>
struct Format<T, Packing::affine8> : AffineGroups<T> {
  static constant constexpr uint kNumbers = 8;
  static inline float value(uint2 codes, uint i) {
    return float(codes[i / 4] >> (i % 4 * 8) & 255u);
  }
};

// Four-bit floats (sign, two bits of exponent, one of mantissa), and scales that are powers of two.
template <typename T>
struct Format<T, Packing::mxfp4> : CodeWords {
  static constant constexpr uint kNumbers = 16;
  static inline float value(uint2 codes, uint i) {
    const uint code = codes[i / 8] >> (i % 8 * 4);
    // As a half with these bits, the number is 2^-14 times as large, which the scale makes good.
    return float(as_type<half>(ushort((code & 7u) << 9 | (code & 8u) << 12)));
  }
  static inline float scale(Matrix<T> matrix, uint group) {
    return as_type<float>(uint(matrix.scales[group]) << 23) * 16384.0f;
  }
  static inline float bias(Matrix<T>, uint) { return 0.0f; }
};

// Numbers of 16 bits, or of 32 with activations in float32.
template <typename T>
struct Format<T, Packing::plain> {
  static constant constexpr uint kNumbers = 8;
  struct Codes {
    vec<T, 4> numbers[kNumbers / 4];
  };
  static inline Codes codes(const device uchar* codes, uint place) {
    Codes numbers;
    QUIRE_UNROLL
    for (uint i = 0; i < kNumbers / 4; ++i) {
      const device vec<T, 4>* const all = reinterpret_cast<const device vec<T, 4>*>(codes);
      numbers.numbers[i] = all[place * (kNumbers / 4) + i];
    }
    return numbers;
  }
  static inline float value(Codes codes, uint i) { return float(codes.numbers[i / 4][i % 4]); }
  static inline float scale(Matrix<T>, uint) { return 1.0f; }
  static inline float bias(Matrix<T>, uint) { return 0.0f; }
};

// Computes kOutputs / matrices outputs of each of one or two matrices, from output `first` on, for
// R rows of x. rows[r] is the number of a row. `left` is the number of outputs from `first` on:
// those behind the last repeat it, as memory behind a matrix may not be mapped. All lanes get the
// sums [R][kOutputs]. `inputs` is a multiple of 16, and so is a group of 1 << group_shift numbers.
template <typename T, Packing packing, uint R, uint matrices>
inline void multiply_tile(
    const device T* x, const thread uint* rows, Matrix<T> one, Matrix<T> two, uint first,
    uint left, uint inputs, uint group_shift, uint lane, thread float* sums) {
  typedef Format<T, packing> F;
  constexpr uint kEach = kOutputs / matrices;
  const uint row_groups = inputs >> group_shift;
  QUIRE_UNROLL
  for (uint i = 0; i < R * kOutputs; ++i) {
    sums[i] = 0.0f;
  }
  for (uint k = lane * F::kNumbers; k < inputs; k += 32 * F::kNumbers) {
    typename F::Codes codes[kOutputs];
    float scales[kOutputs];
    float biases[kOutputs];
    QUIRE_UNROLL
    for (uint o = 0; o < kOutputs; ++o) {
      const uint output = first + min(o % kEach, left - 1);
      const Matrix<T> matrix = o < kEach ? one : two;
      codes[o] = F::codes(matrix.codes, output * (inputs / F::kNumbers) + k / F::kNumbers);
      const uint group = output * row_groups + (k >> group_shift);
      scales[o] = F::scale(matrix, group);
      biases[o] = F::bias(matrix, group);
    }
    float parts[R * kOutputs] = {};
    float totals[R] = {};
    QUIRE_UNROLL
    for (uint i = 0; i < F::kNumbers; i += 4) {
      vec<T, 4> numbers[R];
      QUIRE_UNROLL
      for (uint r = 0; r < R; ++r) {
        numbers[r] = load<4>(x + (rows[r] * inputs + k + i));
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
