#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "ops/ops.h"

namespace quire::ops {

// A linear layer's weights in the order in which they are multiplied (kernels/cpu/linear.h), in
// memory of their own: huge pages where the system has them.
class PackedLinear {
 public:
  explicit PackedLinear(const cpu::LinearShape& shape);
  ~PackedLinear();
  PackedLinear(const PackedLinear&) = delete;
  PackedLinear& operator=(const PackedLinear&) = delete;

  const cpu::LinearShape& shape() const { return shape_; }
  const std::byte* data() const { return data_; }
  std::byte* data() { return data_; }

 private:
  cpu::LinearShape shape_;
  size_t bytes_;
  std::byte* data_;
};

using Packed = std::shared_ptr<const PackedLinear>;

// Codes of a weight, as MLX quantises: w = code * scale + bias over groups of inputs.
struct CodeGroups {
  mx::array scales;  // [outputs, inputs / group]
  mx::array biases;  // same
  int64_t bits;      // 4 or 8
  int64_t group;     // 32, 64 or 128
};

// weights: [outputs, inputs] each, float32, bfloat16 or float16, or uint32 where there are codes;
// several stand one behind the other as one layer. All evaluated. float16 is kept as float32.
// Throws std::invalid_argument for shapes and types that cannot be packed.
Packed pack_linear(
    const std::vector<mx::array>& weights, const std::vector<CodeGroups>& codes,
    const Workers& workers);

}  // namespace quire::ops
