#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ops/ops.h"

// Weights of linear layers, packed for the CPU's kernels, and products of rows and such weights.
namespace quire::ops {

// Linear layers of one shape, packed for multiplication (kernels/cpu/linear.h), one after the other
// in memory of their own. The memory has huge pages if the system provides them.
class PackedLayers {
 public:
  PackedLayers(const cpu::LinearShape& shape, size_t count);
  ~PackedLayers();
  PackedLayers(const PackedLayers&) = delete;
  PackedLayers& operator=(const PackedLayers&) = delete;

  const cpu::LinearShape& shape() const { return shape_; }  // shape of each layer
  size_t count() const { return count_; }
  size_t packed_bytes() const { return count_ * shape_.packed_bytes(); }
  const std::byte* data(size_t layer) const { return data_ + layer * shape_.packed_bytes(); }
  std::byte* data(size_t layer) { return data_ + layer * shape_.packed_bytes(); }

 private:
  cpu::LinearShape shape_;
  size_t count_;
  size_t bytes_;
  std::byte* data_;
};

class PackedLinear : public PackedLayers {
 public:
  explicit PackedLinear(const cpu::LinearShape& shape) : PackedLayers(shape, 1) {}
  using PackedLayers::data;
  const std::byte* data() const { return data(0); }
};

class PackedExperts : public PackedLayers {
 public:
  using PackedLayers::PackedLayers;
};

using Packed = std::shared_ptr<const PackedLinear>;
using PackedStack = std::shared_ptr<const PackedExperts>;

// The codes of a weight that MLX quantised, in groups of inputs: w = code * scale + bias. MXFP4 has
// no biases.
struct CodeGroups {
  mx::array scales;                 // [outputs, inputs / group]
  std::optional<mx::array> biases;  // [outputs, inputs / group]
  int64_t bits;                     // 1 to 6 or 8
  int64_t group;                    // 32, 64 or 128
};

// The codes of each weight array, or an empty vector if no weight has codes.
using Codes = std::vector<std::optional<CodeGroups>>;

// `weights` are evaluated [outputs, inputs] arrays of float32, bfloat16, float16 (read as float32),
// or uint32 codes. Several are stacked as one layer. If `exact`, products never round x. Throws
// std::invalid_argument for shapes and types that cannot be packed.
std::shared_ptr<PackedLinear> pack_linear(
    const std::vector<mx::array>& weights, const Codes& codes, const Workers& workers, bool exact);

// Packs experts as pack_linear() packs a layer. Each array has one more dimension, [experts, ...].
std::shared_ptr<PackedExperts> pack_experts(
    const std::vector<mx::array>& weights, const Codes& codes, const Workers& workers);

// The form of one matrix of a layer. `numbers` is the type of plain numbers, or of scales.
struct MatrixKind {
  int64_t outputs;
  mx::Dtype numbers;
  int64_t bits;  // bits of a code; 0 for plain numbers
  int64_t group;
};

// Returns the bytes of a packed layer of these matrices. Throws as pack_linear() does.
size_t packed_bytes(int64_t inputs, const std::vector<MatrixKind>& matrices);

// Writes row `row` of x, [inputs] float32, to `target`.
using MakeRow = std::function<void(size_t row, float* target)>;

// Returns the number of floats of scratch memory that multiply() needs for `rows` rows.
size_t multiply_scratch(const PackedLinear& packed, size_t rows, const CpuWorkers& workers);

// Computes out [rows][outputs] = x . W^T + residual (if any), for 1 to kMaxRows rows. The caller
// must hold workers.pool. `scratch` must be aligned to a cache line.
void multiply(
    const PackedLinear& packed, size_t rows, const MakeRow& make_row, float* scratch,
    const float* residual, float* out, CpuWorkers& workers);

// One product of prepared rows and a matrix: out [rows][outputs] = x . W^T + residual (if any).
struct Product {
  const cpu::LinearShape* shape;
  const std::byte* packed;
  const std::byte* prepared;
  size_t rows;
  float* out;
  const float* residual = nullptr;
};

// Computes all products in one queue of tasks for all threads. The caller must hold workers.pool.
void multiply_all(std::span<const Product> products, CpuWorkers& workers);

// Calls body(first, count) for blocks of at most kMaxRows rows.
template <class Body>
void for_each_rows(size_t rows, const Body& body) {
  for (size_t first = 0; first < rows; first += cpu::kMaxRows) {
    body(first, rows - first < cpu::kMaxRows ? rows - first : cpu::kMaxRows);
  }
}

}  // namespace quire::ops
