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
  DeviceDecode(DeviceRows rows, DecodeCall call, const DecodeCut& cut)
      : RowsPrimitive("decode_attention", std::move(rows)),
        call_(std::move(call)),
        tasks_(cut.count),
        combines_(cut.combines) {}

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
    const mx::array queries = encoder.contiguous(in[1]);
    out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
    // Where every row is one split the results are in `out` already, and these are not touched.
    mx::array sums = combines_ ? floats(tasks_, query_heads * head_dim) : out[0];
    mx::array softened = combines_ ? floats(tasks_, query_heads * 2) : out[0];
    const mx::array& tasks = in[2];
    const mx::array& first_task = in[3];

    const size_t group = query_heads / kv_heads;
    const size_t tiles = (group + metal::kTileHeads - 1) / metal::kTileHeads;
    encoder.kernel(call_.split);
    encoder.after(in[0]);
    encoder.input(queries, 0);
    encoder.input(tasks, 1);
    bind_rows(encoder, rows(), call_.layer, 2, RowAccess::read);
    encoder.output(sums, 5);
    encoder.output(softened, 6);
    encoder.output(out[0], 7);
    encoder.bytes(arguments, 8);
    encoder.run_groups(MTL::Size(kv_heads * tiles, tasks_, 1));
    if (!combines_) {
      return;
    }
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
  const bool combines_;
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
      std::make_shared<DeviceDecode>(rows, std::move(call), cut),
      {token, queries, cut.tasks, cut.first_task, rows->entries(), rows->pages()});
}

}  // namespace quire::ops
