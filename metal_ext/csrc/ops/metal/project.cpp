#include <algorithm>

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
    std::vector<mx::array> read;  // queries, keys, values, and the weights of two norms
    for (size_t i = 1; i <= kRead; ++i) {
      read.push_back(encoder.contiguous(in[i]));
    }
    out[0].copy_shared_buffer(in[0]);
    out[1].set_data(mx::allocator::malloc(out[1].nbytes()));
    encoder.kernel(kernel_);
    encoder.output(out[0], 0);  // the token; queries are bound there behind it
    for (int i = 0; i < kRead; ++i) {
      encoder.input(read[static_cast<size_t>(i)], i);
    }
    bind_rows(encoder, rows(), layer_, kRead, RowAccess::write);
    encoder.output(out[1], 8);
    encoder.bytes(arguments_, 9);
    encoder.run_groups(
        MTL::Size(arguments_.query_heads + arguments_.kv_heads, arguments_.rows, 1));
  }

 private:
  static constexpr int kRead = 5;

  const LayerRows layer_;
  const metal::Kernel kernel_;
  const metal::ProjectArguments arguments_;
};

metal::ProjectArguments arguments_of(
    const LayerRows& place, const Heads& heads, size_t rows, const std::optional<QKNorms>& norms,
    const RopeTable* rope) {
  metal::ProjectArguments arguments{};
  arguments.place = place.place;
  arguments.query_heads = narrowed<uint32_t>("query_heads", heads.query_heads);
  arguments.kv_heads = narrowed<uint32_t>("kv_heads", heads.kv_heads);
  arguments.rows = narrowed<uint32_t>("rows", rows);
  if (norms) {
    arguments.normed = 1;
    arguments.eps = static_cast<float>(norms->eps);
  }
  if (rope != nullptr) {
    arguments.turned = narrowed<uint32_t>("frequencies", rope->frequencies.size());
    arguments.magnitude = static_cast<float>(rope->magnitude);
    std::ranges::transform(rope->frequencies, arguments.frequencies,
                           [](double x) { return static_cast<float>(x); });
  }
  return arguments;
}

}  // namespace

std::pair<mx::array, mx::array> project_append(
    const mx::array& token, const mx::array& queries, const mx::array& keys,
    const mx::array& values, const std::optional<QKNorms>& norms, const RopeTable* rope,
    const DeviceRows& rows, const Layer& layer, const DeviceMemory& substrate) {
  check_rows_of("project_append", *rows, substrate);
  check_device_rows("queries", queries);
  check_device_rows("keys", keys);
  check_device_rows("values", values);
  check_same_type("keys", keys, "values", values);
  check_same_type("keys", keys, "queries", queries);
  check_projected(queries, keys, values, rows->table());
  check_norms(norms, keys.shape(2));
  if (rope != nullptr) {
    rope->check_head_dim(keys.shape(2));
  }
  rows->table().require_writable();
  const Heads heads{queries.shape(1), keys.shape(1), keys.shape(2)};
  const LayerRows place(*substrate->memory, layer, heads);
  auto kernel = metal::project_append_kernel(
      number_of("keys", keys.dtype()), place.kv, keys.shape(2), place.kind);
  // Without norms the kernel reads no weights, and yet has two bindings for them.
  const mx::array& unread = rows->entries();
  auto made = mx::array::make_arrays(
      {token.shape(), queries.shape()}, {token.dtype(), queries.dtype()},
      std::make_shared<DeviceProjectAppend>(
          rows, place, std::move(kernel), arguments_of(place, heads, rows->size(), norms, rope)),
      {token, queries, keys, values, norms ? norms->query_weight : unread,
       norms ? norms->key_weight : unread, rows->entries(), rows->pages()});
  return {made[0], made[1]};
}

}  // namespace quire::ops
