#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/linear.h"

// Converts weights from MLX's layout to panels (linear.h), and unpacks single outputs' weights.
namespace quire::cpu {

// The type of plain numbers or of scales. A byte e of exponents means 2^(e - 127), as in MXFP4.
enum class StoredNumber { bfloat16, float32, exponents };

// MLX's format of a matrix: plain numbers, or codes with a scale and a bias per group of inputs. If
// scales are exponents, codes are E2M1 floats (OCP Microscaling Formats 1.0) without biases.
struct StoredKind {
  size_t outputs;
  StoredNumber numbers;
  size_t bits = 0;  // bits of a code, 1 to 6 or 8; 0 for plain numbers
  size_t group = 0;
};

// A matrix in MLX's layout, with a row for each output.
struct Weights {
  StoredKind kind;
  // Numbers [outputs][inputs], or each output's codes as a stream of bits (low bits first).
  const void* numbers;
  // Scales and biases are [outputs][groups], or null for plain numbers.
  const void* scales = nullptr;
  const void* biases = nullptr;
};

// Returns the shape of all parts packed as one matrix. No value changes: codes get 4 or 8 bits and
// the smallest group size of any part, and E2M1 codes beside others become numbers of 8 bits. If
// only some parts have codes, all become float32.
LinearShape joined_shape(size_t inputs, std::span<const StoredKind> parts);

// Packs the panels [first, first + count). `shape` is the joined_shape() of the parts. `packed` is
// the memory of the whole packed matrix.
void pack(const LinearShape& shape, std::span<const Weights> parts, size_t first, size_t count,
          std::byte* packed);

// Writes one output's weights, as floats, to target [inputs].
void unpack(const LinearShape& shape, const std::byte* packed, size_t output, float* target);

}  // namespace quire::cpu
