#include <stdexcept>
#include <string>

#include "core/checked.h"
#include "ops/gated_delta.h"

namespace quire::ops {
namespace {

constexpr int64_t kMaxHeads = 256;
constexpr int64_t kMaxDim = 256;
constexpr int64_t kDimStep = 16;  // of every instruction set's vectors a whole number
constexpr int64_t kMaxTailRows = 7;

void check_dim(const char* name, int64_t dim) {
  checked_between(name, dim, kDimStep, kMaxDim);
  if (dim % kDimStep != 0) {
    throw std::invalid_argument(
        std::string(name) + " is " + std::to_string(dim) + "; it must be a multiple of 16");
  }
}

void check_constant(const char* name, const mx::array& x, const mx::Shape& shape) {
  if (x.shape() != shape || x.dtype() != mx::float32) {
    throw std::invalid_argument(std::string(name) + " does not fit the heads, or is no float32");
  }
}

}  // namespace

void DeltaShape::check() const {
  checked_between("value_heads", value_heads, 1, kMaxHeads);
  checked_between("key_heads", key_heads, 1, value_heads);
  check_dim("key_dim", key_dim);
  check_dim("value_dim", value_dim);
  checked_between("tail_rows", tail_rows, 1, kMaxTailRows);
  if (value_heads % key_heads != 0) {
    throw std::invalid_argument(
        std::to_string(value_heads) + " value heads cannot share " + std::to_string(key_heads) +
        " key heads evenly");
  }
}

GatedDelta::GatedDelta(
    const DeltaShape& its_shape, mx::array its_conv, mx::array its_a_log, mx::array its_dt_bias,
    mx::array its_norm, double its_eps)
    : shape(its_shape),
      conv(std::move(its_conv)),
      a_log(std::move(its_a_log)),
      dt_bias(std::move(its_dt_bias)),
      norm(std::move(its_norm)),
      eps(its_eps) {
  shape.check();
  const auto heads = narrowed<int>("value_heads", shape.value_heads);
  check_constant("conv", conv, {narrowed<int>("taps", shape.tail_rows + 1),
                                narrowed<int>("conv_width", shape.conv_width())});
  check_constant("a_log", a_log, {heads});
  check_constant("dt_bias", dt_bias, {heads});
  check_constant("norm", norm, {narrowed<int>("value_dim", shape.value_dim)});
}

void check_state_input(const char* name, const mx::array& x, size_t rows, size_t width) {
  if (x.ndim() != 2 || static_cast<size_t>(x.shape(0)) != rows ||
      static_cast<size_t>(x.shape(1)) != width) {
    throw std::invalid_argument(
        std::string(name) + " must be [" + std::to_string(rows) + ", " + std::to_string(width) +
        "], a row for each of the states' rows");
  }
}

}  // namespace quire::ops
