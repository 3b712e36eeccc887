#include "ops/metal/stored_matrix.h"

#include <bit>
#include <stdexcept>

#include "core/checked.h"
#include "ops/metal/layer_rows.h"
#include "ops/ops.h"

// Checks weights' formats, and binds weights to kernels' arguments.
namespace quire::ops {
namespace {

constexpr int64_t kLaneNumbers = 16;  // kNumbers of multiply.h
constexpr int64_t kAlignment = 16;    // bytes of the longest vectors that kernels load

template <class... Parts>
void require_that(bool has_kernels, const Parts&... parts) {
  require<std::invalid_argument>(has_kernels, "no Metal kernel multiplies this: ", parts...);
}

metal::Packing packing_of(int64_t bits, int64_t group_size, const std::string& mode) {
  if (bits == 0) {
    return metal::Packing::plain;
  }
  if (mode == "mxfp4") {
    require_that(bits == 4 && group_size == 32, "MXFP4 has 4 bits and groups of 32");
    return metal::Packing::mxfp4;
  }
  require_that(
      mode == "affine" && (bits == 4 || bits == 8), "codes of ", bits, " bits, mode ", mode);
  require_that(
      group_size == 32 || group_size == 64 || group_size == 128, "groups of ", group_size);
  return bits == 4 ? metal::Packing::affine4 : metal::Packing::affine8;
}

// Checks an array's shape, and returns its alias.
mx::array alias_of(const char* name, const mx::array& array, const mx::Shape& shape) {
  require_that(array.shape() == shape, name, " has another shape than the weight asks for");
  mx::array alias = uncounted(array, /*transposable=*/false);
  require_that(alias.flags().row_contiguous, name, " is not in row-major order");
  require_that(alias.offset() % kAlignment == 0, name, " is not aligned");
  return alias;
}

}  // namespace

StoredMatrix::StoredMatrix(
    const mx::array& weight, const std::optional<mx::array>& scales,
    const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, int64_t bits,
    int64_t group_size, const std::string& mode)
    : packing_(packing_of(bits, group_size, mode)),
      weight_(alias_of("the weight", weight, weight.shape())) {
  const bool plain = packing_ == metal::Packing::plain;
  const bool affine = !plain && packing_ != metal::Packing::mxfp4;
  require_that(
      (weight.ndim() == 2 || weight.ndim() == 3) && weight.size() > 0,
      "a weight is [outputs, inputs] or [experts, outputs, inputs]");
  require_that(
      scales.has_value() != plain && biases.has_value() == affine,
      "its scales and biases do not fit its codes");
  mx::Shape shape = weight.shape();
  const int64_t inputs = plain ? int64_t{shape.back()} : int64_t{shape.back()} * 32 / bits;
  require_that(inputs % kLaneNumbers == 0, inputs, " inputs");
  experts_ = weight.ndim() == 3 ? narrowed<uint32_t>("experts", shape[0]) : 1;
  outputs_ = narrowed<uint32_t>("outputs", shape[shape.size() - 2]);
  inputs_ = narrowed<uint32_t>("inputs", inputs);
  const int shift = std::countr_zero(uint64_t(group_size));
  group_shift_ = plain ? 0 : narrowed<uint32_t>("group_shift", shift);
  const auto set_type = [this](const char* name, mx::Dtype type) {
    number_of(name, type);
    require_that(!type_ || *type_ == type, name, " has another type than other parts");
    type_ = type;
  };
  if (plain) {
    set_type("the weight", weight.dtype());
  } else {
    require_that(weight.dtype() == mx::uint32, "codes are uint32 words");
    require_that(inputs % group_size == 0, inputs, " inputs in groups of ", group_size);
    shape.back() = narrowed<int>("groups", inputs / group_size);
    scales_ = alias_of("scales", *scales, shape);
  }
  if (affine) {
    biases_ = alias_of("biases", *biases, shape);
    set_type("scales", scales->dtype());
    set_type("biases", biases->dtype());
  } else if (!plain) {
    require_that(scales->dtype() == mx::uint8, "scales of MXFP4 are exponents, uint8");
  }
  if (bias) {
    shape.pop_back();
    bias_ = alias_of("bias", *bias, shape);
    set_type("bias", bias->dtype());
  }
}

bool StoredMatrix::shares_format(const StoredMatrix& other) const {
  return packing_ == other.packing_ && group_shift_ == other.group_shift_ &&
         inputs_ == other.inputs_;
}

void StoredMatrix::append_to(std::vector<mx::array>& inputs) const {
  inputs.push_back(weight_);
  for (const auto* part : {&scales_, &biases_, &bias_}) {
    if (*part) {
      inputs.push_back(**part);
    }
  }
}

void StoredMatrix::bind(
    Encoder& encoder, int codes, int scales, int biases, uint32_t first) const {
  bind_part(encoder, weight_, codes, first);
  bind_part(encoder, scales_, scales, first);
  bind_part(encoder, biases_, biases, first);
}

void StoredMatrix::bind_bias(Encoder& encoder, int index, uint32_t first) const {
  bind_part(encoder, bias_, index, first);
}

void StoredMatrix::bind_part(
    Encoder& encoder, const std::optional<mx::array>& part, int index, uint32_t first) const {
  if (!part) {
    encoder.input(weight_, index);
    return;
  }
  const auto rows = int64_t{experts_} * outputs_;
  encoder.input(*part, index, static_cast<int64_t>(part->nbytes()) / rows * first);
}

}  // namespace quire::ops
