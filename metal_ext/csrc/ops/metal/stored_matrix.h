#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "metal/arguments.h"
#include "mlx/array.h"
#include "mlx/dtype.h"
#include "ops/metal/encoder.h"

// Weights of linear layers, in the formats that the Metal kernels multiply (multiply.h).
namespace quire::ops {

// The matrix of a linear layer, or a stack of experts' matrices. Keeps its arrays under aliases
// that MLX does not count (uncounted() in ops.h).
class StoredMatrix {
 public:
  // `weight` is [outputs, inputs] of plain numbers if `bits` is 0, else of MLX's codes. A stack has
  // one more dimension, [experts, ...], and so have its scales, biases and bias. `bias` is the
  // linear layer's [outputs]. Throws std::invalid_argument for formats that no kernel has, and for
  // arrays that are not evaluated, not in row-major order, or not aligned to 16 bytes.
  StoredMatrix(
      const mx::array& weight, const std::optional<mx::array>& scales,
      const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, int64_t bits,
      int64_t group_size, const std::string& mode);

  metal::Packing packing() const { return packing_; }
  uint32_t experts() const { return experts_; }  // 1 unless this is a stack
  uint32_t outputs() const { return outputs_; }  // of one expert
  uint32_t inputs() const { return inputs_; }
  uint32_t group_shift() const { return group_shift_; }  // 1 << group_shift numbers share a scale
  // Returns the type of activations with which products can be computed; none for any type.
  const std::optional<mx::Dtype>& type() const { return type_; }
  bool has_bias() const { return bias_.has_value(); }
  // Tells whether one command can multiply rows by both.
  bool shares_format(const StoredMatrix& other) const;

  // Appends all arrays. They must be inputs of each operation, because MLX keeps inputs alive.
  void append_to(std::vector<mx::array>& inputs) const;
  // Binds codes (or plain numbers), scales and biases, from output `first` of each expert on, to
  // these indices. Binds the codes in the place of arrays that the matrix does not have.
  void bind(Encoder& encoder, int codes, int scales, int biases, uint32_t first = 0) const;
  // Binds the linear layer's bias likewise.
  void bind_bias(Encoder& encoder, int index, uint32_t first = 0) const;

 private:
  void bind_part(
      Encoder& encoder, const std::optional<mx::array>& part, int index, uint32_t first) const;

  const metal::Packing packing_;
  mx::array weight_;
  std::optional<mx::array> scales_;
  std::optional<mx::array> biases_;
  std::optional<mx::array> bias_;
  uint32_t experts_;
  uint32_t outputs_;
  uint32_t inputs_;
  uint32_t group_shift_;
  std::optional<mx::Dtype> type_;
};

using Stored = std::shared_ptr<const StoredMatrix>;

// Returns the number of tiles that `count` rows or outputs fill, the last one maybe in part.
inline uint32_t tiles_of(uint32_t count, uint32_t tile) { return (count + tile - 1) / tile; }

}  // namespace quire::ops
