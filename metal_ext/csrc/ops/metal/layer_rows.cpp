#include "ops/metal/layer_rows.h"

#include <bit>
#include <stdexcept>

#include "ops/checks.h"

// Checks the place of a layer's K and V on a GPU, and binds it to kernels' arguments.
namespace quire::ops {

metal::Number number_of(const char* name, mx::Dtype type) {
  if (type == mx::float32) {
    return metal::Number::float32;
  }
  if (type == mx::float16) {
    return metal::Number::float16;
  }
  if (type == mx::bfloat16) {
    return metal::Number::bfloat16;
  }
  throw std::invalid_argument(message(name, " must be float32, float16 or bfloat16"));
}

uint32_t number_of_gate(const std::string& kind) {
  switch (cpu::gate_of(kind)) {
    case cpu::Gate::gelu_tanh: return metal::kGeluTanh;
    case cpu::Gate::clamped_silu: return metal::kClampedSilu;
    default: return metal::kSilu;
  }
}

LayerRows::LayerRows(
    const metal::KVBackend& memory, const Layer& layer, const Heads& heads)
    : kv(number_of("K and V", layer.type)), kind(memory.kind()) {
  const Geometry& geometry = memory.geometry();
  check_heads(geometry, layer, heads.query_heads, heads.kv_heads);
  require<std::invalid_argument>(
      heads.head_dim == 64 || heads.head_dim == 128 || heads.head_dim == 256, "head_dim is ",
      heads.head_dim, "; the Metal kernels are built for 64, 128 and 256");
  check_row_bytes(geometry, layer, heads.row_elements() * mx::size_of(layer.type));
  const auto key_region = static_cast<size_t>(layer.key_region);
  const metal::RegionPlace keys = memory.place(key_region);
  const metal::RegionPlace values = memory.place(static_cast<size_t>(layer.value_region));
  require<std::invalid_argument>(
      keys.buffer == values.buffer,
      "keys and values of a layer must be regions 2i and 2i + 1, which lie in one buffer");
  buffer = keys.buffer;
  place = {keys.offset, values.offset,
           narrowed<uint32_t>("row_bytes", geometry.row_bytes(key_region)),
           narrowed<uint32_t>("block_shift", std::countr_zero(geometry.tokens_per_block()))};
}

void bind_rows(
    Encoder& encoder, const MetalRows& rows, const LayerRows& layer, int first_index,
    RowAccess access) {
  const int pages = first_index + 1;
  const int arena = first_index + 2;
  encoder.input(rows.entries(), first_index, rows.entries_offset(layer.buffer));
  encoder.input(rows.pages(), pages);
  encoder.input(rows.entries(), arena);  // not read on kinds without an arena
  for (mx::array buffer : rows.written(layer.buffer)) {
    if (access == RowAccess::write) {
      encoder.output(buffer, arena);
    } else if (layer.kind == metal::Kind::dense) {
      encoder.input(buffer, arena);
    }
  }
}

void run_over_rows(Encoder& encoder, size_t row_elements, size_t rows) {
  constexpr size_t kNumbersPerThread = 4;
  encoder.run_threads(MTL::Size(row_elements / kNumbersPerThread, rows, 1));
}

void check_device_rows(const char* name, const mx::array& x) {
  check_rows_shape(name, x);
  number_of(name, x.dtype());
}

void check_same_type(
    const char* x_name, const mx::array& x, const char* y_name, const mx::array& y) {
  require<std::invalid_argument>(
      x.dtype() == y.dtype(), x_name, " and ", y_name, " have different types");
}

}  // namespace quire::ops
