#include "ops/project.h"

#include <cmath>
#include <string>
#include <vector>

#include "core/checked.h"
#include "cpu/head_dims.h"
#include "mlx/ops.h"
#include "ops/kv_rows.h"
#include "ops/primitive.h"

namespace quire::ops {
namespace {

class RopeAngles final : public CachePrimitive {
 public:
  RopeAngles(Rows rows, double base, double scale, Workers workers)
      : CachePrimitive("rope_angles"),
        rows_(std::move(rows)),
        base_(base),
        scale_(scale),
        workers_(std::move(workers)) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& out) override {
    allocate(out[0]);
    enqueue([rows = rows_, base = base_, scale = scale_, workers = workers_,
             result = mx::array::unsafe_weak_copy(out[0])]() mutable {
      const auto half = static_cast<size_t>(result.shape(1)) / 2;
      std::vector<double> turns(half);
      for (size_t i = 0; i < half; ++i) {
        turns[i] = scale * std::pow(base, -static_cast<double>(i) / static_cast<double>(half));
      }
      const auto held = workers->pool.hold();
      for_each_row(workers->pool, rows->rows().size(), [&](size_t row, size_t) {
        const auto position = static_cast<double>(rows->rows()[row].position);
        float* const angles = result.data<float>() + row * 2 * half;
        for (size_t i = 0; i < half; ++i) {
          angles[i] = static_cast<float>(std::cos(position * turns[i]));
          angles[half + i] = static_cast<float>(std::sin(position * turns[i]));
        }
      });
    });
  }

 private:
  Rows rows_;
  double base_;
  double scale_;
  Workers workers_;
};

// Inputs: the token, queries, keys and values, both norms' weights, the angles.
class ProjectAppend final : public CachePrimitive {
 public:
  ProjectAppend(Rows rows, Layer layer, cpu::HeadShape shape, float eps, Workers workers)
      : CachePrimitive("project_append"),
        rows_(std::move(rows)),
        layer_(layer),
        shape_(shape),
        eps_(eps),
        workers_(std::move(workers)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].copy_shared_buffer(in[0]);
    allocate(out[1]);
    enqueue([rows = rows_, layer = layer_, shape = shape_, eps = eps_, workers = workers_,
             joined = mx::array::unsafe_weak_copy(in[1]),
             query_weight = mx::array::unsafe_weak_copy(in[2]),
             key_weight = mx::array::unsafe_weak_copy(in[3]),
             angles = mx::array::unsafe_weak_copy(in[4]),
             result = mx::array::unsafe_weak_copy(out[1])]() mutable {
      const cpu::Kernels& kernels = workers->kernels;
      const size_t dims = shape.head_dim;
      const size_t row_numbers = shape.query_floats() + 2 * shape.row_elements();
      const auto held = workers->pool.hold();
      float* const scratch =
          workers->pool.scratch(workers->pool.threads() * (shape.row_elements() + dims));
      for_each_row(workers->pool, rows->rows().size(), [&](size_t row, size_t worker) {
        const float* const queries = joined.data<float>() + row * row_numbers;
        const float* const keys = queries + shape.query_floats();
        float* const turned = scratch + worker * (shape.row_elements() + dims);
        float* const normed = turned + shape.row_elements();
        const auto turn = [&](const float* heads, size_t count, const mx::array& weight,
                              float* to) {
          for (size_t i = 0; i < count * dims; i += dims) {
            kernels.layer.rms_norm(heads + i, weight.data<float>(), eps, dims, normed);
            kernels.layer.rotate(normed, angles.data<float>() + row * dims, dims, to + i);
          }
        };
        const RowTable::Row& place = rows->rows()[row];
        turn(queries, shape.query_heads, query_weight,
             result.data<float>() + row * shape.query_floats());
        turn(keys, shape.kv_heads, key_weight, turned);
        write_row(place, layer.key_region, turned, shape, kernels);
        write_row(place, layer.value_region, keys + shape.row_elements(), shape, kernels);
      });
    });
  }

 private:
  Rows rows_;
  Layer layer_;
  cpu::HeadShape shape_;
  float eps_;
  Workers workers_;
};

void check_floats(const char* name, const mx::array& x, const mx::Shape& shape) {
  if (x.dtype() != mx::float32 || x.shape() != shape) {
    throw std::invalid_argument(std::string(name) + " does not fit the rows, or is no float32");
  }
}

}  // namespace

mx::array rope_angles(
    const Rows& rows, int64_t head_dim, double base, double scale, const Workers& workers) {
  if (!(base > 0.0 && std::isfinite(base) && std::isfinite(scale))) {
    throw std::invalid_argument("base must be a positive number, and scale a number");
  }
  checked_between("head_dim", head_dim, 2, cpu::kMaxHeadDim);
  if (head_dim % 2 != 0) {
    throw std::invalid_argument("head_dim must be even");
  }
  const auto count = narrowed<int>("rows", rows->rows().size());
  return mx::array({count, narrowed<int>("head_dim", head_dim)}, mx::float32,
                   std::make_shared<RopeAngles>(rows, base, scale, workers), {});
}

std::pair<mx::array, mx::array> project_append(
    const mx::array& token, const mx::array& joined, const HeadNorms& norms,
    const mx::array& angles, const Rows& rows, const Layer& layer, int64_t query_heads,
    int64_t kv_heads, const Workers& workers) {
  const int64_t head_dim = norms.query_weight.size();
  const cpu::HeadShape shape =
      check_layer(rows->geometry(), layer, query_heads, kv_heads, head_dim);
  const auto count = narrowed<int>("rows", rows->rows().size());
  const auto dims = narrowed<int>("head_dim", head_dim);
  check_floats("joined", joined,
               {count, narrowed<int>("numbers of a row",
                                     shape.query_floats() + 2 * shape.row_elements())});
  check_floats("query_weight", norms.query_weight, {dims});
  check_floats("key_weight", norms.key_weight, {dims});
  check_floats("angles", angles, {count, dims});
  rows->require_writable();
  auto made = mx::array::make_arrays(
      {token.shape(), {count, narrowed<int>("query_heads", query_heads), dims}},
      {token.dtype(), mx::float32},
      std::make_shared<ProjectAppend>(rows, layer, shape, static_cast<float>(norms.eps), workers),
      {token, mx::contiguous(joined), mx::contiguous(norms.query_weight),
       mx::contiguous(norms.key_weight), mx::contiguous(angles)});
  return {made[0], made[1]};
}

}  // namespace quire::ops
