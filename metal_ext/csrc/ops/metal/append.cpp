#include <algorithm>

#include "ops/checks.h"
#include "ops/metal/layer_rows.h"
#include "ops/metal/ops.h"

// Writes K and V to a GPU's memory. Heads may be normalised and rotated before.
namespace quire::ops {
namespace {

struct Append {
  DeviceRows rows;
  LayerRows layer;
  metal::Kernel kernel;
  Heads heads;

  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    const mx::array keys = encoder.contiguous(in[1]);
    const mx::array values = encoder.contiguous(in[2]);
    out[0].copy_shared_buffer(in[0]);
    const metal::AppendArguments arguments{
        layer.place, heads.row_elements(), narrowed<uint32_t>("rows", rows->size())};
    encoder.kernel(kernel);
    encoder.output(out[0], 0);  // for MLX's ordering alone: keys take index 0 next
    encoder.input(keys, 0);
    encoder.input(values, 1);
    bind_rows(encoder, *rows, layer, 2, RowAccess::write);
    encoder.bytes(arguments, 5);
    run_over_rows(encoder, heads.row_elements(), rows->size());
  }
};

struct ProjectAppend {
  DeviceRows rows;
  LayerRows layer;
  metal::Kernel kernel;
  metal::ProjectArguments arguments;

  // `in` has the ordering handle (ops.h), queries, keys, values, and the weights of two norms.
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    constexpr int kRead = 5;
    const std::vector<mx::array> read = encoder.contiguous_inputs(in, kRead);
    out[0].copy_shared_buffer(in[0]);
    allocate_on_device(out[1]);
    encoder.kernel(kernel);
    encoder.output(out[0], 0);  // for MLX's ordering alone: queries take index 0 next
    encoder.inputs(read);
    bind_rows(encoder, *rows, layer, kRead, RowAccess::write);
    encoder.output(out[1], 8);
    encoder.bytes(arguments, 9);
    encoder.run_groups(MTL::Size(arguments.query_heads + arguments.kv_heads, arguments.rows, 1));
  }
};

metal::ProjectArguments arguments_of(
    const LayerRows& place, const Heads& heads, size_t rows, const std::optional<QKNorms>& norms,
    const std::optional<Rope>& rope) {
  metal::ProjectArguments arguments{};
  arguments.place = place.place;
  arguments.query_heads = narrowed<uint32_t>("query_heads", heads.query_heads);
  arguments.kv_heads = narrowed<uint32_t>("kv_heads", heads.kv_heads);
  arguments.rows = narrowed<uint32_t>("rows", rows);
  if (norms) {
    arguments.normed = 1;
    arguments.eps = static_cast<float>(norms->eps);
  }
  if (rope) {
    const RopeTable& table = **rope;
    arguments.turned = narrowed<uint32_t>("frequencies", table.frequencies.size());
    arguments.magnitude = static_cast<float>(table.magnitude);
    std::ranges::transform(table.frequencies, arguments.frequencies,
                           [](double x) { return static_cast<float>(x); });
  }
  return arguments;
}

}  // namespace

mx::array device::append(
    const mx::array& token, const mx::array& keys, const mx::array& values,
    const DeviceRows& rows, const Layer& layer, const DeviceMemory& kv_backend) {
  check_rows_of("append", *rows, kv_backend);
  check_device_rows("keys", keys);
  check_device_rows("values", values);
  check_same_shape(keys, values);
  check_same_type("keys", keys, "values", values);
  check_row_count("keys", keys, rows->table());
  rows->table().require_writable();
  const Heads heads{keys.shape(1), keys.shape(1), keys.shape(2)};
  const LayerRows place(*kv_backend->memory, layer, heads);
  auto kernel = metal::append_kernel(number_of("keys", keys.dtype()), place.kv, place.kind);
  return mx::array(
      token.shape(), token.dtype(),
      device_operation("append", Append{rows, place, std::move(kernel), heads}),
      {token, keys, values, rows->entries(), rows->pages()});
}

std::pair<mx::array, mx::array> device::project_append(
    const mx::array& token, const mx::array& queries, const mx::array& keys,
    const mx::array& values, const std::optional<QKNorms>& norms,
    const std::optional<Rope>& rope,
    const DeviceRows& rows, const Layer& layer, const DeviceMemory& kv_backend) {
  check_rows_of("project_append", *rows, kv_backend);
  check_device_rows("queries", queries);
  check_device_rows("keys", keys);
  check_device_rows("values", values);
  check_same_type("keys", keys, "values", values);
  check_same_type("keys", keys, "queries", queries);
  check_projected(queries, keys, values, rows->table());
  check_norms(norms, keys.shape(2));
  if (rope) {
    (*rope)->check_head_dim(keys.shape(2));
  }
  rows->table().require_writable();
  const Heads heads{queries.shape(1), keys.shape(1), keys.shape(2)};
  const LayerRows place(*kv_backend->memory, layer, heads);
  auto kernel = metal::project_append_kernel(
      number_of("keys", keys.dtype()), place.kv, keys.shape(2), place.kind);
  // The kernel needs some array for the norms' weights, even if there are no norms to read them.
  const mx::array& unread = rows->entries();
  const auto results = mx::array::make_arrays(
      {token.shape(), queries.shape()}, {token.dtype(), queries.dtype()},
      device_operation(
          "project_append",
          ProjectAppend{rows, place, std::move(kernel),
                        arguments_of(place, heads, rows->size(), norms, rope)}),
      {token, queries, keys, values, norms ? norms->query_weight : unread,
       norms ? norms->key_weight : unread, rows->entries(), rows->pages()});
  return {results[0], results[1]};
}

}  // namespace quire::ops
