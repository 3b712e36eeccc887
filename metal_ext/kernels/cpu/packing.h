#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/linear.h"

// Converts weights from MLX's layout to panels (linear.h), and unpacks rows, as for tokens' ids.
namespace quire::cpu {

// The type of plain numbers or of scales. exponents: bytes e that mean 2^(e - 127), as in MXFP4.
enum class StoredNumber { bfloat16, float32, exponents };

// How MLX stores a matrix: plain numbers, or codes with a scale and a bias per group. Codes with
// exponents are E2M1 floats (OCP Microscaling Formats 1.0) and have no biases.
struct StoredKind {
  size_t outputs;
  StoredNumber numbers;
  size_t bits = 0;  // bits of a code, 1 to 6 or 8; 0 for plain numbers
  size_t group = 0;
};

// A matrix in MLX's layout, [outputs] rows.
struct Weights {
  StoredKind kind;
  // [outputs][inputs]; or each output's codes, a stream of bits from each byte's lowest bit on.
  const void* numbers;
  // [outputs][groups], or null.
  const void* scales = nullptr;
  const void* biases = nullptr;
};

// Returns the packed shape of stacked matrices with the same inputs. No value changes: codes become
// 4 or 8 bits wide with the smallest group of all, and plain numbers beside codes become float32.
LinearShape joined_shape(size_t inputs, std::span<const StoredKind> parts);

// Packs `count` panels from `first` on. shape: joined_shape() of the parts. packed: the whole
// layer.
void pack(const LinearShape& shape, std::span<const Weights> parts, size_t first, size_t count,
          std::byte* packed);

// Unpacks one output's weights to target [inputs].
void unpack(const LinearShape& shape, const std::byte* packed, size_t output, float* target);

}  // namespace quire::cpu
