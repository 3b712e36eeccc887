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
  if (x.ndim() != 3) {
    throw std::invalid_argument(
        std::string(name) + " has " + std::to_string(x.ndim()) +
        " dimensions; it must be [rows, heads, head_dim]");
  }
  if (x.dtype() != mx::float32 && x.dtype() != mx::bfloat16) {
    throw std::invalid_argument(std::string(name) + " must be float32 or bfloat16 on the CPU");
  }
}

cpu::HeadShape check_layer(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads,
    int64_t head_dim) {
  const auto last = static_cast<int64_t>(geometry.regions()) - 1;
  checked_between("key_region", layer.key_region, 0, last);
  checked_between("value_region", layer.value_region, 0, last);
  checked_between("query_heads", query_heads, 1, cpu::kMaxQueryHeads);
  checked_between("kv_heads", kv_heads, 1, query_heads);
  if (query_heads % kv_heads != 0) {
    throw std::invalid_argument(
        std::to_string(query_heads) + " query heads cannot share " + std::to_string(kv_heads) +
        " KV heads evenly");
  }
  if (head_dim < 1 || !cpu::supports_head_dim(static_cast<size_t>(head_dim))) {
    throw std::invalid_argument(
        "head_dim is " + std::to_string(head_dim) +
        "; the CPU kernels are built for 32, 64, 128 and 256");
  }
  const cpu::HeadShape shape{
      static_cast<size_t>(query_heads), static_cast<size_t>(kv_heads),
      static_cast<size_t>(head_dim), kv_type_of(layer.type)};
  for (int64_t region : {layer.key_region, layer.value_region}) {
    const size_t row = geometry.row_bytes(static_cast<size_t>(region));
    if (row != shape.row_bytes()) {
      throw std::invalid_argument(
          "region " + std::to_string(region) + " has rows of " + std::to_string(row) +
          " bytes; these heads need " + std::to_string(shape.row_bytes()));
    }
  }
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

}  // namespace quire::ops
