#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

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

// Codes of a weight as MLX quantises, by groups of inputs: w = code * scale + bias; without biases
// the floats of MXFP4.
struct CodeGroups {
  mx::array scales;                 // [outputs, inputs / group]
  std::optional<mx::array> biases;  // same
  int64_t bits;                     // 1 to 6 or 8
  int64_t group;                    // 32, 64 or 128
};

// weights: [outputs, inputs] each, float32, bfloat16 or float16, or uint32 where there are codes;
// several stand one behind the other as one layer. All evaluated. float16 is read as float32.
// codes: of each weight; or empty, where all are plain.
// Throws std::invalid_argument for shapes and types that cannot be packed.
Packed pack_linear(
    const std::vector<mx::array>& weights, const std::vector<std::optional<CodeGroups>>& codes,
    const Workers& workers);

// One of a layer's matrices, before it is read. numbers: plain ones' type, or scales'.
struct MatrixKind {
  int64_t outputs;
  mx::Dtype numbers;
  int64_t bits;  // 0 where there are no codes
  int64_t group;
};

// Bytes that matrices of so many inputs take as one layer. Throws as pack_linear() does.
size_t packed_bytes(int64_t inputs, const std::vector<MatrixKind>& matrices);

}  // namespace quire::ops
