#include <stdexcept>

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
  metal::Kernel split;
  metal::Kernel combine;
  size_t task_count;
  bool combines;

  // `in` has the ordering handle (ops.h), queries, tasks, and each row's first task.
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    const auto query_heads = static_cast<size_t>(heads.query_heads);
    const auto kv_heads = static_cast<size_t>(heads.kv_heads);
    const auto head_dim = static_cast<size_t>(heads.head_dim);
    const metal::AttentionArguments arguments{
        layer.place, narrowed<uint32_t>("query_heads", query_heads),
        narrowed<uint32_t>("kv_heads", kv_heads), narrowed<uint32_t>("rows", first_row), scale};
    const mx::array queries = encoder.contiguous(in[1]);
    allocate_on_device(out[0]);
    // If each row is one split, decode_split writes `out` itself, and uses neither of these arrays.
    mx::array sums = combines ? floats(task_count, query_heads * head_dim) : out[0];
    mx::array softened = combines ? floats(task_count, query_heads * 2) : out[0];
    const mx::array& tasks = in[2];
    const mx::array& first_task = in[3];

    const size_t group = query_heads / kv_heads;
    const size_t tiles = (group + metal::kTileHeads - 1) / metal::kTileHeads;
    encoder.kernel(split);
    encoder.after(in[0]);
    encoder.input(queries, 0);
    encoder.input(tasks, 1);
    bind_rows(encoder, *rows, layer, 2, RowAccess::read);
    encoder.output(sums, 5);
    encoder.output(softened, 6);
    encoder.output(out[0], 7);
    encoder.bytes(arguments, 8);
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
    encoder.run_groups(MTL::Size(query_heads, static_cast<size_t>(out[0].shape(0)), 1));
    encoder.keep(std::move(sums));
    encoder.keep(std::move(softened));
  }

  static mx::array floats(size_t rows, size_t numbers) {
    return mx::array(
        mx::allocator::malloc(rows * numbers * sizeof(float)),
        {narrowed<int>("tasks", rows), narrowed<int>("numbers of a task", numbers)}, mx::float32);
  }
};

}  // namespace

mx::array device::decode_attention(
    const mx::array& token, const mx::array& queries, const DeviceRows& rows, int64_t first_row,
    const Layer& layer, int64_t kv_heads, const Softmax& softmax,
    const DeviceMemory& kv_backend) {
  if (softmax.window != SIZE_MAX || softmax.softcap != 0.0f || softmax.sinks) {
    throw std::invalid_argument("a GPU's attention has no window, softcap or sinks");
  }
  check_rows_of("decode_attention", *rows, kv_backend);
  check_device_rows("queries", queries);
  checked_run("rows of the table", first_row, queries.shape(0), rows->size());
  const Heads heads{queries.shape(1), kv_heads, queries.shape(2)};
  const LayerRows place(*kv_backend->memory, layer, heads);
  const auto first = static_cast<size_t>(first_row);
  const metal::Number type = number_of("queries", queries.dtype());
  const int head_dim = queries.shape(2);
  const DecodeCut& cut = rows->decode_cut(first, static_cast<size_t>(queries.shape(0)));
  Decode decode{
      rows, place, heads, first, softmax.scale,
      metal::decode_split_kernel(type, place.kv, head_dim, place.kind),
      metal::decode_combine_kernel(type, head_dim), cut.count, cut.combines};
  return mx::array(
      queries.shape(), queries.dtype(), device_operation("decode_attention", std::move(decode)),
      {token, queries, cut.tasks, cut.first_task, rows->entries(), rows->pages()});
}

}  // namespace quire::ops
