#include "ops/kv_rows.h"

#include <stdexcept>

namespace quire::ops {

cpu::KVType kv_type_of(mx::Dtype type) {
  if (type == mx::bfloat16) {
    return cpu::KVType::bfloat16;
  }
  if (type == mx::float32) {
    return cpu::KVType::float32;
  }
  throw std::invalid_argument("the CPU substrate keeps K and V as bfloat16 or float32");
}

void check_rows_array(const char* name, const mx::array& x) {
  check_rows_shape(name, x);
  if (x.dtype() != mx::float32 && x.dtype() != mx::bfloat16) {
    throw std::invalid_argument(std::string(name) + " must be float32 or bfloat16 on the CPU");
  }
}

void check_on_host(const AddressRange& range) {
  if (dynamic_cast<const HostRange*>(&range) == nullptr) {
    throw std::invalid_argument(
        "the range's memory is a device's: rows of it are made by its MetalSubstrate");
  }
}

cpu::HeadShape check_layer(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads,
    int64_t head_dim) {
  check_heads(geometry, layer, query_heads, kv_heads);
  if (head_dim < 1 || !cpu::supports_head_dim(static_cast<size_t>(head_dim))) {
    throw std::invalid_argument(
        "head_dim is " + std::to_string(head_dim) +
        "; the CPU kernels are built for 32, 64, 128 and 256");
  }
  const cpu::HeadShape shape{
      static_cast<size_t>(query_heads), static_cast<size_t>(kv_heads),
      static_cast<size_t>(head_dim), kv_type_of(layer.type)};
  check_row_bytes(geometry, layer, shape.row_bytes());
  return shape;
}

const float* row_as_floats(
    const mx::array& x, size_t row, const cpu::Kernels& kernels, float* copy) {
  const auto heads = static_cast<size_t>(x.shape(1));
  const auto dims = static_cast<size_t>(x.shape(2));
  const int64_t start = static_cast<int64_t>(row) * x.strides(0);
  const bool dense = x.strides(2) == 1 && (heads == 1 || x.strides(1) == x.shape(2));
  if (x.dtype() == mx::float32 && dense) {
    return x.data<float>() + start;
  }
  if (dense) {
    kernels.from_bfloat16(x.data<uint16_t>() + start, copy, heads * dims);
    return copy;
  }
  for (size_t h = 0; h < heads; ++h) {
    if (x.dtype() == mx::float32 && x.strides(2) == 1) {
      const float* const head = x.data<float>() + start + static_cast<int64_t>(h) * x.strides(1);
      std::memcpy(copy + h * dims, head, dims * sizeof(float));
      continue;
    }
    for (size_t i = 0; i < dims; ++i) {
      const int64_t at = start + static_cast<int64_t>(h) * x.strides(1) +
                         static_cast<int64_t>(i) * x.strides(2);
      if (x.dtype() == mx::float32) {
        copy[h * dims + i] = x.data<float>()[at];
      } else {
        kernels.from_bfloat16(x.data<uint16_t>() + at, copy + h * dims + i, 1);
      }
    }
  }
  return copy;
}

void write_row(
    const RowTable::Row& place, int64_t region, const float* source, const cpu::HeadShape& shape,
    const cpu::Kernels& kernels) {
  std::byte* const target =
      place.range->region(static_cast<size_t>(region)) + place.position * shape.row_bytes();
  if (shape.type == cpu::KVType::float32) {
    std::memcpy(target, source, shape.row_bytes());
  } else {
    kernels.to_bfloat16(source, reinterpret_cast<uint16_t*>(target), shape.row_elements());
  }
}

}  // namespace quire::ops
