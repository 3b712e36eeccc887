#include "ops/checks.h"
#include "ops/metal/layer_rows.h"
#include "ops/metal/ops.h"

// Attention of single rows over their sequences, on a GPU.
namespace quire::ops {
namespace {

struct Decode {
  DeviceRows rows;
  LayerRows layer;
  Heads heads;
  size_t first_row;
  float scale;
  float softcap;
  uint32_t window;
  size_t tiles;  // of the query heads that share a KV head
  metal::Kernel split;
  metal::Kernel combine;
  size_t task_count;
  bool combines;
  uint32_t has_sinks;

  // `in` has the ordering handle (ops.h), queries, tasks, each row's first task, and further arrays
  // to keep. The last are the sinks if there are any.
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    const auto query_heads = static_cast<size_t>(heads.query_heads);
    const auto kv_heads = static_cast<size_t>(heads.kv_heads);
    const auto head_dim = static_cast<size_t>(heads.head_dim);
    const metal::AttentionArguments arguments{
        layer.place, narrowed<uint32_t>("query_heads", query_heads),
        narrowed<uint32_t>("kv_heads", kv_heads), narrowed<uint32_t>("rows", first_row), scale,
        softcap, window, has_sinks, 0};
    const mx::array queries = encoder.contiguous(in[1]);
    // Without sinks, kernels do not read this array.
    const mx::array sinks = has_sinks != 0 ? encoder.contiguous(in.back()) : queries;
    allocate_on_device(out[0]);
    // If each row is one split, decode_split writes `out` itself, and uses neither of these arrays.
    mx::array sums = combines ? temporary(task_count, query_heads * head_dim) : out[0];
    mx::array softened = combines ? temporary(task_count, query_heads * 2) : out[0];
    const mx::array& tasks = in[2];
    const mx::array& first_task = in[3];

    encoder.kernel(split);
    encoder.after(in[0]);
    encoder.input(queries, 0);
    encoder.input(tasks, 1);
    bind_rows(encoder, *rows, layer, 2, RowAccess::read);
    encoder.output(sums, 5);
    encoder.output(softened, 6);
    encoder.output(out[0], 7);
    encoder.bytes(arguments, 8);
    encoder.input(sinks, 9);
    encoder.run_groups(MTL::Size(kv_heads * tiles, task_count, 1));
    if (!combines) {
      return;
    }
    encoder.kernel(combine);
    encoder.input(sums, 0);
    encoder.input(softened, 1);
    encoder.input(first_task, 2);
    encoder.output(out[0], 3);
    encoder.bytes(arguments, 4);
    encoder.input(sinks, 5);
    encoder.run_groups(MTL::Size(query_heads, static_cast<size_t>(out[0].shape(0)), 1));
    encoder.keep(std::move(sums));
    encoder.keep(std::move(softened));
  }
};

}  // namespace

mx::array device::decode_attention(
    const mx::array& token, const mx::array& queries, const DeviceRows& rows, int64_t first_row,
    const Layer& layer, int64_t kv_heads, const Softmax& softmax,
    const DeviceMemory& kv_backend) {
  check_rows_of("decode_attention", *rows, kv_backend);
  check_device_rows("queries", queries);
  checked_run("rows of the table", first_row, queries.shape(0), rows->size());
  softmax.check_heads(queries.shape(1));
  rows->table().require_mapped(softmax.window);
  const Heads heads{queries.shape(1), kv_heads, queries.shape(2)};
  const LayerRows place(*kv_backend->memory, layer, heads);
  const auto first = static_cast<size_t>(first_row);
  const metal::Number type = number_of("queries", queries.dtype());
  const int head_dim = queries.shape(2);
  const uint32_t window =
      softmax.window == SIZE_MAX ? 0 : narrowed<uint32_t>("window", softmax.window);
  const auto group = narrowed<uint32_t>("query_heads", heads.query_heads / heads.kv_heads);
  const size_t tile = metal::tile_heads(group);
  const DecodeCut& cut = rows->decode_cut(first, static_cast<size_t>(queries.shape(0)), window);
  Decode decode{
      rows, place, heads, first, softmax.scale, softmax.softcap, window,
      (group + tile - 1) / tile,
      metal::decode_split_kernel(type, place.kv, head_dim, group, place.kind),
      metal::decode_combine_kernel(type, head_dim), cut.count, cut.combines,
      softmax.sinks ? 1u : 0u};
  std::vector<mx::array> in{token, queries, cut.tasks, cut.first_task, rows->entries(),
                            rows->pages()};
  if (softmax.sinks) {
    in.push_back(*softmax.sinks);
  }
  return mx::array(
      queries.shape(), queries.dtype(), device_operation("decode_attention", std::move(decode)),
      std::move(in));
}

}  // namespace quire::ops
