#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/linear.h"

// From weights as MLX has them to panels, and back. Nothing here is in a hurry: weights are packed
// once, and a row is unpacked where a token is looked up.
namespace quire::cpu {

// A layer's weights as MLX has them, rows of outputs one behind the other.
struct Weights {
  // bfloat16 or float32 [outputs][inputs]; or words of 32 bits, an output's codes from the lowest
  // bits on.
  const void* numbers;
  // [outputs][groups], of the shape's type; null where there are no codes.
  const void* scales = nullptr;
  const void* biases = nullptr;
};

// Packs `count` panels from `first` on. packed: the whole layer's, shape.packed_bytes().
void pack(const LinearShape& shape, const Weights& weights, size_t first, size_t count,
          std::byte* packed);

// One output's weights: target [inputs].
void unpack(const LinearShape& shape, const std::byte* packed, size_t output, float* target);

}  // namespace quire::cpu
