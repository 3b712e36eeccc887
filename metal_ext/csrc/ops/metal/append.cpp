#include "ops/checks.h"
#include "ops/metal/layer.h"
#include "ops/metal/ops.h"
#include "ops/metal/primitive.h"

namespace quire::ops {
namespace {

class DeviceAppend final : public RowsPrimitive {
 public:
  DeviceAppend(DeviceRows rows, const LayerRows& layer, metal::Kernel kernel, Heads heads)
      : RowsPrimitive("append", std::move(rows)),
        layer_(layer),
        kernel_(std::move(kernel)),
        heads_(heads) {}

 protected:
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const mx::array keys = encoder.contiguous(in[1]);
    const mx::array values = encoder.contiguous(in[2]);
    out[0].copy_shared_buffer(in[0]);
    const metal::AppendArguments arguments{
        layer_.place, heads_.row_elements(), narrowed<uint32_t>("rows", rows().size())};
    encoder.kernel(kernel_);
    encoder.output(out[0], 0);  // the token; keys are bound there behind it
    encoder.input(keys, 0);
    encoder.input(values, 1);
    bind_rows(encoder, rows(), layer_, 2, RowAccess::write);
    encoder.bytes(arguments, 5);
    run_over_rows(encoder, heads_.row_elements(), rows().size());
  }

 private:
  const LayerRows layer_;
  const metal::Kernel kernel_;
  const Heads heads_;
};

}  // namespace

mx::array append(
    const mx::array& token, const mx::array& keys, const mx::array& values,
    const DeviceRows& rows, const Layer& layer, const DeviceMemory& substrate) {
  check_rows_of("append", *rows, substrate);
  check_device_rows("keys", keys);
  check_device_rows("values", values);
  check_same_shape(keys, values);
  check_same_type("keys", keys, "values", values);
  check_row_count("keys", keys, rows->table());
  rows->table().require_writable();
  const Heads heads{keys.shape(1), keys.shape(1), keys.shape(2)};
  const LayerRows place(*substrate->memory, layer, heads);
  auto kernel = metal::append_kernel(number_of("keys", keys.dtype()), place.kv, place.kind);
  return mx::array(
      token.shape(), token.dtype(),
      std::make_shared<DeviceAppend>(rows, place, std::move(kernel), heads),
      {token, keys, values, rows->entries(), rows->pages()});
}

}  // namespace quire::ops
