#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/linear.h"

// From weights as MLX has them to panels, and back. Nothing here is in a hurry: weights are packed
// once, and a row is unpacked where a token is looked up.
namespace quire::cpu {

// The type of plain numbers or of scales. exponents: bytes e for 2^(e - 127), the scales of MXFP4.
enum class StoredNumber { bfloat16, float32, exponents };

// How MLX stores a matrix: plain numbers; or codes with a scale and a bias for each group. Codes
// with exponents are floats of 4 bits (E2M1 of the OCP's Microscaling Formats 1.0), without biases.
struct StoredKind {
  size_t outputs;
  StoredNumber numbers;
  size_t bits = 0;  // of a code: 1 to 6 or 8; 0 where numbers are plain
  size_t group = 0;
};

// A matrix as MLX has it, rows of outputs one behind the other.
struct Weights {
  StoredKind kind;
  // [outputs][inputs]; or an output's codes, a stream of bits from each byte's lowest on.
  const void* numbers;
  // [outputs][groups]; null where there are none.
  const void* scales = nullptr;
  const void* biases = nullptr;
};

// The layer of matrices with the same inputs, one behind the other. What is alike is kept as it is.
// Codes become 4 or 8 bits wide, with the smallest of their groups; every number stays the same.
// Only where plain numbers stand beside codes, these become float32.
LinearShape joined_shape(size_t inputs, std::span<const StoredKind> parts);

// Packs `count` panels from `first` on. parts: of a layer of that shape, by joined_shape(). packed:
// the whole layer's, shape.packed_bytes().
void pack(const LinearShape& shape, std::span<const Weights> parts, size_t first, size_t count,
          std::byte* packed);

// One output's weights: target [inputs].
void unpack(const LinearShape& shape, const std::byte* packed, size_t output, float* target);

}  // namespace quire::cpu
