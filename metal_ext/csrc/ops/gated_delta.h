#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/states.h"
#include "ops/ops.h"

// Gated delta nets: recurrent layers whose state has a constant size and lies in a state slot.
namespace quire::ops {

// The heads and the convolution of a layer. A key head serves value_heads / key_heads value heads.
struct DeltaShape {
  size_t value_heads;
  size_t key_heads;
  size_t key_dim;
  size_t value_dim;
  size_t tail_rows;

  // Throws if the heads do not divide evenly, or if a dimension is no multiple of 16.
  DeltaShape(
      int64_t value_heads, int64_t key_heads, int64_t key_dim, int64_t value_dim,
      int64_t tail_rows);

  size_t keys_width() const { return key_heads * key_dim; }
  size_t values_width() const { return value_heads * value_dim; }
  // Returns the width of a row of queries, keys and values together.
  size_t conv_width() const { return 2 * keys_width() + values_width(); }
  size_t head_numbers() const { return key_dim * value_dim; }
  // Returns the bytes that the state S takes, [value_heads][value_dim][key_dim] float32.
  size_t state_bytes() const { return value_heads * head_numbers() * sizeof(float); }
  // Returns the bytes of the convolution's tail [tail_rows][conv_width]. In a slot, it follows S.
  size_t tail_bytes(size_t itemsize) const { return tail_rows * conv_width() * itemsize; }
};

// The weights of one gated delta net without its projections, all float32.
struct GatedDelta {
  // `conv` is [tail_rows + 1, conv_width], the newest row's weights last. a_log and dt_bias are
  // [value_heads], norm is [value_dim]. Throws std::invalid_argument for other shapes.
  GatedDelta(
      const DeltaShape& shape, mx::array conv, mx::array a_log, mx::array dt_bias, mx::array norm,
      double eps);

  const DeltaShape shape;
  const mx::array conv;
  const mx::array a_log;
  const mx::array dt_bias;
  const mx::array norm;
  const double eps;  // epsilon of the norm
};

using Delta = std::shared_ptr<const GatedDelta>;
using SlotRows = std::shared_ptr<const StateRows>;

std::pair<mx::array, mx::array> gated_delta(
    const mx::array& token, const mx::array& qkv, const mx::array& z, const mx::array& a,
    const mx::array& b, const Delta& delta, const SlotRows& rows, int64_t offset,
    const Workers& workers);

// `arrays` are qkv, z, a, b. Throws std::invalid_argument unless each has `rows` rows of the right
// width, and the offset is a multiple of 4.
void check_delta(
    const DeltaShape& shape, const std::vector<mx::array>& arrays, size_t rows, int64_t offset);

}  // namespace quire::ops
