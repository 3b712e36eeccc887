#include <cmath>
#include <stdexcept>
#include <string>

#include "mlx/ops.h"
#include "ops/checks.h"
#include "ops/metal/layer.h"
#include "ops/metal/ops.h"
#include "ops/metal/primitive.h"

namespace quire::ops {
namespace {

class DeviceProjectAppend final : public RowsPrimitive {
 public:
  DeviceProjectAppend(
      DeviceRows rows, const LayerRows& layer, metal::Kernel kernel,
      metal::ProjectArguments arguments)
      : RowsPrimitive("project_append", std::move(rows)),
        layer_(layer),
        kernel_(std::move(kernel)),
        arguments_(arguments) {}

 protected:
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].copy_shared_buffer(in[0]);
    out[1].set_data(mx::allocator::malloc(out[1].nbytes()));
    encoder.kernel(kernel_);
    encoder.output(out[0], 0);  // the token; queries are bound there behind it
    for (int i = 0; i < 5; ++i) {  // queries, keys, values, and the weights of two norms
      encoder.input(in[static_cast<size_t>(i) + 1], i);
    }
    bind_rows(encoder, rows(), layer_, 5, RowAccess::write);
    encoder.output(out[1], 8);
    encoder.bytes(arguments_, 9);
    encoder.run_groups(
        MTL::Size(arguments_.query_heads + arguments_.kv_heads, arguments_.rows, 1));
  }

 private:
  const LayerRows layer_;
  const metal::Kernel kernel_;
  const metal::ProjectArguments arguments_;
};

void check_weight(const char* name, const mx::array& weight, const mx::array& keys) {
  if (weight.ndim() != 1 || weight.shape(0) != keys.shape(2)) {
    throw std::invalid_argument(
        std::string(name) + " must be [" + std::to_string(keys.shape(2)) + "], one per dimension");
  }
  check_same_type("keys", keys, name, weight);
}

}  // namespace

std::pair<mx::array, mx::array> project_append(
    const mx::array& token, const mx::array& queries, const mx::array& keys,
    const mx::array& values, const Projection& projection, const DeviceRows& rows,
    const Layer& layer, const DeviceMemory& substrate) {
  check_rows_of("project_append", *rows, substrate);
  check_device_rows("queries", queries);
  check_device_rows("keys", keys);
  check_device_rows("values", values);
  check_same_shape(keys, values);
  check_same_type("keys", keys, "values", values);
  check_same_type("keys", keys, "queries", queries);
  check_weight("q_weight", projection.query_weight, keys);
  check_weight("k_weight", projection.key_weight, keys);
  check_row_count("queries", queries, rows->table());
  check_row_count("keys", keys, rows->table());
  if (queries.shape(2) != keys.shape(2)) {
    throw std::invalid_argument("queries and keys have a different head_dim");
  }
  if (!(projection.rope_base > 0.0 && std::isfinite(projection.rope_base))) {
    throw std::invalid_argument("rope_base must be a positive number");
  }
  rows->table().require_writable();
  const Heads heads{queries.shape(1), keys.shape(1), keys.shape(2)};
  const LayerRows place(*substrate->memory, layer, heads);
  auto kernel = metal::project_append_kernel(
      number_of("keys", keys.dtype()), place.kv, keys.shape(2), place.kind);
  const metal::ProjectArguments arguments{
      place.place,
      narrowed<uint32_t>("query_heads", heads.query_heads),
      narrowed<uint32_t>("kv_heads", heads.kv_heads),
      narrowed<uint32_t>("rows", rows->size()),
      static_cast<float>(projection.eps),
      static_cast<float>(std::log2(projection.rope_base)),
      static_cast<float>(projection.rope_scale)};
  auto made = mx::array::make_arrays(
      {token.shape(), queries.shape()}, {token.dtype(), queries.dtype()},
      std::make_shared<DeviceProjectAppend>(rows, place, std::move(kernel), arguments),
      {token, mx::contiguous(queries), mx::contiguous(keys), mx::contiguous(values),
       mx::contiguous(projection.query_weight), mx::contiguous(projection.key_weight),
       rows->entries(), rows->pages()});
  return {made[0], made[1]};
}

}  // namespace quire::ops
