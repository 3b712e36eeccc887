#include "ops/project.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/checked.h"
#include "mlx/ops.h"
#include "ops/kv_rows.h"
#include "ops/primitive.h"

namespace quire::ops {
namespace {

class RopeAngles final : public RowsPrimitive {
 public:
  RopeAngles(Rows rows, std::shared_ptr<const RopeTable> rope, Workers workers)
      : RowsPrimitive("rope_angles"),
        rows_(std::move(rows)),
        rope_(std::move(rope)),
        workers_(std::move(workers)) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& out) override {
    allocate(out[0]);
    enqueue([rows = rows_, rope = rope_, workers = workers_,
             result = mx::array::unsafe_weak_copy(out[0])]() mutable {
      const std::vector<double>& frequencies = rope->frequencies;
      const size_t half = frequencies.size();
      const auto held = workers->pool.hold();
      for_each_row(workers->pool, rows->rows().size(), [&](size_t row, size_t) {
        const auto position = static_cast<double>(rows->rows()[row].position);
        float* const angles = result.data<float>() + row * 2 * half;
        for (size_t i = 0; i < half; ++i) {
          const double angle = position * frequencies[i];
          angles[i] = static_cast<float>(std::cos(angle) * rope->magnitude);
          angles[half + i] = static_cast<float>(std::sin(angle) * rope->magnitude);
        }
      });
    });
  }

 private:
  Rows rows_;
  std::shared_ptr<const RopeTable> rope_;
  Workers workers_;
};

// What is done to a row's heads. A null pointer: not that.
struct HeadWork {
  const cpu::Kernels& kernels;
  size_t dims;
  float eps;
  const float* angles;
  size_t turning;  // dimensions, the first of a head
  float* normed;  // [dims], for its own use

  void run(const float* heads, size_t count, const float* weight, float* to) const {
    for (size_t i = 0; i < count * dims; i += dims) {
      const float* head = heads + i;
      if (weight != nullptr) {
        float* const target = angles == nullptr ? to + i : normed;
        kernels.layer.rms_norm(head, weight, eps, dims, target);
        head = target;
      }
      if (angles != nullptr) {
        kernels.layer.rotate(head, angles, turning, to + i);
        std::memcpy(to + i + turning, head + turning, (dims - turning) * sizeof(float));
      } else if (weight == nullptr) {
        std::memcpy(to + i, head, dims * sizeof(float));
      }
    }
  }
};

// Inputs: the token, queries, keys and values, then both norms' weights and the angles, where they
// are given.
class ProjectAppend final : public CachePrimitive {
 public:
  ProjectAppend(
      Rows rows, Layer layer, cpu::HeadShape shape, std::optional<float> eps,
      size_t turning, Workers workers)
      : CachePrimitive("project_append"),
        rows_(std::move(rows)),
        layer_(layer),
        shape_(shape),
        eps_(eps),
        turning_(turning),
        workers_(std::move(workers)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].copy_shared_buffer(in[0]);
    allocate(out[1]);
    std::vector<mx::array> arrays;
    for (const mx::array& x : in) {
      arrays.push_back(mx::array::unsafe_weak_copy(x));
    }
    enqueue([rows = rows_, layer = layer_, shape = shape_, eps = eps_, turning = turning_,
             workers = workers_, arrays = std::move(arrays),
             result = mx::array::unsafe_weak_copy(out[1])]() mutable {
      const float* const query_weight = eps ? arrays[4].data<float>() : nullptr;
      const float* const key_weight = eps ? arrays[5].data<float>() : nullptr;
      const float* const angles = turning > 0 ? arrays.back().data<float>() : nullptr;
      const cpu::Kernels& kernels = workers->kernels;
      const size_t dims = shape.head_dim;
      const size_t wide = shape.query_floats();  // keys and values are no wider
      const size_t scratch_floats = 2 * wide + dims;
      const auto held = workers->pool.hold();
      float* const scratch = workers->pool.scratch(workers->pool.threads() * scratch_floats);
      for_each_row(workers->pool, rows->rows().size(), [&](size_t row, size_t worker) {
        float* const copy = scratch + worker * scratch_floats;
        float* const made = copy + wide;
        const HeadWork work{kernels, dims, eps.value_or(0.0f),
                            turning > 0 ? angles + row * turning : nullptr, turning,
                            made + wide};
        const auto given = [&](size_t i) { return row_as_floats(arrays[i], row, kernels, copy); };
        if (result.dtype() == mx::float32) {
          work.run(given(1), shape.query_heads, query_weight, result.data<float>() + row * wide);
        } else {
          work.run(given(1), shape.query_heads, query_weight, made);
          kernels.to_bfloat16(made, result.data<uint16_t>() + row * wide, wide);
        }
        const RowTable::Row& place = rows->rows()[row];
        work.run(given(2), shape.kv_heads, key_weight, made);
        write_row(place, layer.key_region, made, shape, kernels);
        write_row(place, layer.value_region, given(3), shape, kernels);
      });
    });
  }

 private:
  Rows rows_;
  Layer layer_;
  cpu::HeadShape shape_;
  std::optional<float> eps_;
  size_t turning_;
  Workers workers_;
};

}  // namespace

mx::array rope_angles(
    const Rows& rows, const std::shared_ptr<const RopeTable>& rope, const Workers& workers) {
  const auto count = narrowed<int>("rows", rows->rows().size());
  return mx::array({count, narrowed<int>("angles", 2 * rope->frequencies.size())}, mx::float32,
                   std::make_shared<RopeAngles>(rows, rope, workers), {});
}

std::pair<mx::array, mx::array> project_append(
    const mx::array& token, const mx::array& queries, const mx::array& keys,
    const mx::array& values, const std::optional<QKNorms>& norms,
    const std::optional<mx::array>& angles, const Rows& rows, const Layer& layer,
    const Workers& workers) {
  check_rows_array("queries", queries);
  check_rows_array("keys", keys);
  check_rows_array("values", values);
  check_projected(queries, keys, values, *rows);
  const int dims = keys.shape(2);
  const cpu::HeadShape shape =
      check_layer(rows->geometry(), layer, queries.shape(1), keys.shape(1), dims);
  check_norms(norms, dims);
  std::vector<mx::array> in{token, queries, keys, values};
  size_t turning = 0;
  std::optional<float> eps;
  if (norms) {
    eps = static_cast<float>(norms->eps);
    in.push_back(row_by_row(norms->query_weight));
    in.push_back(row_by_row(norms->key_weight));
  }
  if (angles) {
    const bool fits = angles->ndim() == 2 && angles->shape(0) == queries.shape(0) &&
                      angles->shape(1) > 0 && angles->shape(1) <= dims && angles->shape(1) % 2 == 0;
    if (angles->dtype() != mx::float32 || !fits) {
      throw std::invalid_argument("angles do not fit the rows, or are no float32");
    }
    turning = static_cast<size_t>(angles->shape(1));
    in.push_back(row_by_row(*angles));
  }
  rows->require_writable();
  auto made = mx::array::make_arrays(
      {token.shape(), queries.shape()}, {token.dtype(), queries.dtype()},
      std::make_shared<ProjectAppend>(rows, layer, shape, eps, turning, workers), in);
  return {made[0], made[1]};
}

}  // namespace quire::ops
