#include "mlx/ops.h"
#include "ops/checks.h"
#include "ops/metal/layer.h"
#include "ops/metal/ops.h"
#include "ops/metal/primitive.h"

namespace quire::ops {
namespace {

struct DecodeCall {
  LayerRows layer;
  Heads heads;
  size_t first_row;
  float scale;
  metal::Kernel split;
  metal::Kernel combine;
};

class DeviceDecode final : public RowsPrimitive {
 public:
  DeviceDecode(DeviceRows rows, DecodeCall call, size_t tasks)
      : RowsPrimitive("decode_attention", std::move(rows)),
        call_(std::move(call)),
        tasks_(tasks) {}

 protected:
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const auto query_heads = static_cast<size_t>(call_.heads.query_heads);
    const auto kv_heads = static_cast<size_t>(call_.heads.kv_heads);
    const auto head_dim = static_cast<size_t>(call_.heads.head_dim);
    const metal::AttentionArguments arguments{
        call_.layer.place, narrowed<uint32_t>("query_heads", query_heads),
        narrowed<uint32_t>("kv_heads", kv_heads), narrowed<uint32_t>("rows", call_.first_row),
        call_.scale};
    mx::array sums = floats(tasks_, query_heads * head_dim);
    mx::array softened = floats(tasks_, query_heads * 2);
    const mx::array& tasks = in[2];
    const mx::array& first_task = in[3];

    const size_t group = query_heads / kv_heads;
    const size_t tiles = (group + metal::kTileHeads - 1) / metal::kTileHeads;
    encoder.kernel(call_.split);
    encoder.after(in[0]);
    encoder.input(in[1], 0);
    encoder.input(tasks, 1);
    bind_rows(encoder, rows(), call_.layer, 2, RowAccess::read);
    encoder.output(sums, 5);
    encoder.output(softened, 6);
    encoder.bytes(arguments, 7);
    encoder.run_groups(MTL::Size(kv_heads * tiles, tasks_, 1));

    out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
    encoder.kernel(call_.combine);
    encoder.input(sums, 0);
    encoder.input(softened, 1);
    encoder.input(first_task, 2);
    encoder.output(out[0], 3);
    encoder.bytes(arguments, 4);
    encoder.run_groups(MTL::Size(query_heads, static_cast<size_t>(out[0].shape(0)), 1));
    encoder.keep(std::move(sums));
    encoder.keep(std::move(softened));
  }

 private:
  static mx::array floats(size_t rows, size_t numbers) {
    return mx::array(
        mx::allocator::malloc(rows * numbers * sizeof(float)),
        {narrowed<int>("tasks", rows), narrowed<int>("numbers of a task", numbers)}, mx::float32);
  }

  const DecodeCall call_;
  const size_t tasks_;
};

}  // namespace

mx::array decode_attention(
    const mx::array& token, const mx::array& queries, const DeviceRows& rows, int64_t first_row,
    const Layer& layer, int64_t kv_heads, double scale, const DeviceMemory& substrate) {
  check_rows_of("decode_attention", *rows, substrate);
  check_device_rows("queries", queries);
  checked_run("rows of the table", first_row, queries.shape(0), rows->size());
  const Heads heads{queries.shape(1), kv_heads, queries.shape(2)};
  const LayerRows place(*substrate->memory, layer, heads);
  const auto first = static_cast<size_t>(first_row);
  const metal::Number type = number_of("queries", queries.dtype());
  const int head_dim = queries.shape(2);
  DecodeCall call{
      place, heads, first, static_cast<float>(scale),
      metal::decode_split_kernel(type, place.kv, head_dim, place.kind),
      metal::decode_combine_kernel(type, head_dim)};
  const DecodeCut& cut = rows->decode_cut(first, static_cast<size_t>(queries.shape(0)));
  return mx::array(
      queries.shape(), queries.dtype(),
      std::make_shared<DeviceDecode>(rows, std::move(call), cut.count),
      {token, mx::contiguous(queries), cut.tasks, cut.first_task, rows->entries(),
       rows->pages()});
}

}  // namespace quire::ops
