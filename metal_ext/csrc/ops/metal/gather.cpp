#include <stdexcept>

#include "ops/checks.h"
#include "ops/metal/layer_rows.h"
#include "ops/metal/on_device.h"
#include "ops/metal/ops.h"

// Makes arrays of a sequence's K and V, as copies or views, for attention of many rows.
namespace quire::ops {
namespace {

struct Gather {
  DeviceRows rows;
  LayerRows layer;
  metal::Kernel kernel;
  metal::GatherArguments arguments;

  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    encoder.kernel(kernel);
    encoder.after(in[0]);
    bind_rows(encoder, *rows, layer, 0, RowAccess::read);
    for (int i = 0; i < 2; ++i) {
      mx::array& copy = out[static_cast<size_t>(i)];
      allocate_on_device(copy);
      encoder.output(copy, 3 + i);
    }
    encoder.bytes(arguments, 5);
    run_over_rows(encoder, arguments.row_elements, arguments.tokens);
  }
};

// A view needs no command. The ordering handle (ops.h) makes MLX evaluate a view after all appends.
// The GPU reads a view after appends that declare a write to the view's buffer (bind_rows).
struct RegionView {
  DeviceMemory kv_backend;
  std::shared_ptr<AddressRange> range;
  size_t region;
  size_t offset;

  void encode(Encoder&, const std::vector<mx::array>&, std::vector<mx::array>& out) const {
    const metal::BufferPlace place = kv_backend->memory->own(*range).view(region);
    mx::allocator::Data memory(
        as_mlx_buffer(place.buffer),
        [range = range, kv_backend = kv_backend](mx::allocator::Buffer) {});
    show(out[0], std::move(memory), place.offset + offset);
  }
};

}  // namespace

std::pair<mx::array, mx::array> device::gather(
    const mx::array& token, const DeviceRows& rows, int64_t segment, int64_t first, int64_t tokens,
    const Layer& layer, int64_t kv_heads, int64_t head_dim, const DeviceMemory& kv_backend) {
  check_rows_of("gather", *rows, kv_backend);
  const std::vector<Segment>& segments = rows->table().segments();
  checked_run("segments of the table", segment, 1, segments.size());
  const auto number = static_cast<size_t>(segment);
  const int64_t shown = segments[number].start + segments[number].count;
  checked_run("tokens of the segment's range", first, tokens, static_cast<uint64_t>(shown));
  const size_t mapped = segments[number].range->mapped_run(static_cast<size_t>(shown - 1)).first;
  require<std::out_of_range>(
      static_cast<size_t>(first) >= mapped, "the first token is ", first, "; those before ", mapped,
      " are unmapped");
  const auto most = static_cast<int64_t>(
      rows->kv_backend()->memory->geometry().row_bytes(0));  // the most head_dim and kv_heads
  checked_between("head_dim", head_dim, 1, most);
  checked_between("kv_heads", kv_heads, 1, most);
  const Heads heads{kv_heads, kv_heads, head_dim};
  const LayerRows place(*kv_backend->memory, layer, heads);
  const metal::GatherArguments arguments{
      place.place, heads.row_elements(), narrowed<uint32_t>("tokens", tokens),
      narrowed<uint32_t>("rows", rows->first_row(number)), narrowed<uint32_t>("first", first)};
  const mx::Shape shape{narrowed<int>("tokens", tokens), narrowed<int>("kv_heads", kv_heads),
                        narrowed<int>("head_dim", head_dim)};
  const auto results = mx::array::make_arrays(
      {shape, shape}, {layer.type, layer.type},
      device_operation(
          "gather", Gather{rows, place, metal::gather_kernel(place.kv, place.kind), arguments}),
      {token, rows->entries(), rows->pages()});
  return {results[0], results[1]};
}

mx::array device::region_view(
    const mx::array& token, const std::shared_ptr<AddressRange>& range, int64_t region,
    int64_t tokens, int64_t kv_heads, int64_t head_dim, mx::Dtype type,
    const DeviceMemory& kv_backend, int64_t first) {
  if (kv_backend->memory->kind() == metal::Kind::paged) {
    throw std::invalid_argument(
        "a paged region lies in no one array: metal_ext.gather copies its rows into one");
  }
  const auto [shape, offset] =
      check_view(*range, region, first, tokens, kv_heads, head_dim, type);
  const auto row = kv_backend->by_address.find(range.get());
  if (row != kv_backend->by_address.end() &&
      row->second > kv_backend->memory->epochs().completed()) {
    throw std::logic_error(
        "region_view of a range of which epoch " + std::to_string(row->second) +
        " has one row: metal_ext.gather copies its rows in order");
  }
  kv_backend->memory->own(*range);
  return mx::array(
      shape, type,
      device_operation(
          "region_view", RegionView{kv_backend, range, static_cast<size_t>(region), offset}),
      {token});
}

}  // namespace quire::ops
