#include "ops/kv_rows.h"
#include "ops/primitive.h"

namespace quire::ops {
namespace {

class Append final : public CachePrimitive {
 public:
  Append(Rows rows, Layer layer, cpu::HeadShape shape, Workers workers)
      : CachePrimitive("append"),
        rows_(std::move(rows)),
        layer_(layer),
        shape_(shape),
        workers_(std::move(workers)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].copy_shared_buffer(in[0]);
    enqueue([rows = rows_, layer = layer_, shape = shape_, workers = workers_,
             keys = mx::array::unsafe_weak_copy(in[1]),
             values = mx::array::unsafe_weak_copy(in[2])] {
      const auto held = workers->pool.hold();
      float* const scratch =
          workers->pool.scratch(workers->pool.threads() * shape.row_elements());
      for_each_row(workers->pool, rows->rows().size(), [&](size_t row, size_t worker) {
        float* const copy = scratch + worker * shape.row_elements();
        write(*rows, row, layer.key_region, keys, shape, workers->kernels, copy);
        write(*rows, row, layer.value_region, values, shape, workers->kernels, copy);
      });
    });
  }

 private:
  static void write(
      const RowTable& rows, size_t row, int64_t region, const mx::array& x,
      const cpu::HeadShape& shape, const cpu::Kernels& kernels, float* copy) {
    write_row(rows.rows()[row], region, row_as_floats(x, row, kernels, copy), shape, kernels);
  }

  Rows rows_;
  Layer layer_;
  cpu::HeadShape shape_;
  Workers workers_;
};

}  // namespace

mx::array append(
    const mx::array& token, const mx::array& keys, const mx::array& values, const Rows& rows,
    const Layer& layer, const Workers& workers) {
  check_rows_array("keys", keys);
  check_rows_array("values", values);
  check_same_shape(keys, values);
  check_row_count("keys", keys, *rows);
  rows->require_writable();
  const cpu::HeadShape shape =
      check_layer(rows->geometry(), layer, keys.shape(1), keys.shape(1), keys.shape(2));
  return mx::array(
      token.shape(), token.dtype(), std::make_shared<Append>(rows, layer, shape, workers),
      {token, keys, values});
}

}  // namespace quire::ops
