#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "ops/checks.h"
#include "ops/primitive.h"

// Writes K and V to sequences' memory, on a CPU. Heads may be normalised and rotated before.
namespace quire::ops {
namespace {

constexpr size_t kMaxFrequencies = cpu::kMaxHeadDim / 2;
constexpr size_t kRowsPerTask = 16;

// Writes a row of [kv_heads * head_dim] float32 to its place in a region, in the region's type.
void write_row(
    const RowTable::Row& place, int64_t region, const float* source, const cpu::HeadShape& shape,
    const cpu::Kernels& kernels) {
  std::byte* const target =
      place.region(static_cast<size_t>(region)) + place.position * shape.row_bytes();
  if (shape.type == cpu::KVType::float32) {
    std::memcpy(target, source, shape.row_bytes());
  } else {
    kernels.to_bfloat16(source, reinterpret_cast<uint16_t*>(target), shape.row_elements());
  }
}

struct Append {
  static constexpr Results kResults = Results::token;
  Rows rows;
  Layer layer;
  cpu::HeadShape shape;
  Workers workers;

  void run(const Arrays& in, const Arrays&) const {
    const cpu::Kernels& kernels = workers->kernels;
    const auto held = workers->pool.hold();
    float* const scratch = workers->pool.scratch(workers->pool.threads() * shape.row_elements());
    workers->pool.run_in_groups(rows->rows().size(), kRowsPerTask, [&](size_t row, size_t worker) {
      float* const copy = scratch + worker * shape.row_elements();
      const RowTable::Row& place = rows->rows()[row];
      write_row(place, layer.key_region, row_as_floats(in[1], row, kernels, copy), shape, kernels);
      write_row(place, layer.value_region, row_as_floats(in[2], row, kernels, copy), shape,
                kernels);
    });
  }
};

struct RopeAngles {
  static constexpr Results kResults = Results::rows;
  Rows rows;
  Rope rope;
  Workers workers;

  void run(const Arrays&, Arrays& out) const {
    const std::vector<double>& frequencies = rope->frequencies;
    const size_t half = frequencies.size();
    const auto held = workers->pool.hold();
    workers->pool.run_in_groups(rows->rows().size(), kRowsPerTask, [&](size_t row, size_t) {
      const auto position = static_cast<double>(rows->rows()[row].position);
      float* const angles = out.floats(0) + row * 2 * half;
      for (size_t i = 0; i < half; ++i) {
        const double angle = position * frequencies[i];
        angles[i] = static_cast<float>(std::cos(angle) * rope->magnitude);
        angles[half + i] = static_cast<float>(std::sin(angle) * rope->magnitude);
      }
    });
  }
};

// Normalises a row's heads unless the weight is null, and rotates them unless angles are null.
struct HeadWork {
  const cpu::Kernels& kernels;
  size_t dims;
  float eps;
  const float* angles;
  size_t turning;  // the number of a head's first dimensions that rotate
  float* normed;  // scratch [dims]

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

struct ProjectAppend {
  static constexpr Results kResults = Results::token;
  Rows rows;
  Layer layer;
  cpu::HeadShape shape;
  std::optional<float> eps;
  size_t turning;
  Workers workers;

  // `in`: ordering handle, queries, keys, values; two weights if there are norms; angles if RoPE.
  void run(const Arrays& in, Arrays& out) const {
    const float* const query_weight = eps ? in.floats(4) : nullptr;
    const float* const key_weight = eps ? in.floats(5) : nullptr;
    const float* const angles = turning > 0 ? in.back().data<float>() : nullptr;
    const cpu::Kernels& kernels = workers->kernels;
    const size_t dims = shape.head_dim;
    const size_t wide = shape.query_floats();  // a row of keys or values is no wider
    const size_t scratch_floats = 2 * wide + dims;
    const auto held = workers->pool.hold();
    float* const scratch = workers->pool.scratch(workers->pool.threads() * scratch_floats);
    workers->pool.run_in_groups(rows->rows().size(), kRowsPerTask, [&](size_t row, size_t worker) {
      float* const copy = scratch + worker * scratch_floats;
      float* const target = copy + wide;
      const HeadWork work{kernels, dims, eps.value_or(0.0f),
                          turning > 0 ? angles + row * turning : nullptr, turning, target + wide};
      const auto given = [&](size_t i) { return row_as_floats(in[i], row, kernels, copy); };
      if (out[1].dtype() == mx::float32) {
        work.run(given(1), shape.query_heads, query_weight, out.floats(1) + row * wide);
      } else {
        work.run(given(1), shape.query_heads, query_weight, target);
        kernels.to_bfloat16(target, out[1].data<uint16_t>() + row * wide, wide);
      }
      const RowTable::Row& place = rows->rows()[row];
      work.run(given(2), shape.kv_heads, key_weight, target);
      write_row(place, layer.key_region, target, shape, kernels);
      write_row(place, layer.value_region, given(3), shape, kernels);
    });
  }
};

}  // namespace

const float* row_as_floats(
    const mx::array& x, size_t row, const cpu::Kernels& kernels, float* copy) {
  const auto heads = static_cast<size_t>(x.shape(1));
  const auto dims = static_cast<size_t>(x.shape(2));
  const int64_t start = static_cast<int64_t>(row) * x.strides(0);
  const bool dense = x.strides(2) == 1 && (heads == 1 || x.strides(1) == x.shape(2));
  if (x.dtype() == mx::float32 && dense) {
    return x.data<float>() + start;
  }
  if (dense) {
    kernels.from_bfloat16(x.data<uint16_t>() + start, copy, heads * dims);
    return copy;
  }
  for (size_t h = 0; h < heads; ++h) {
    if (x.dtype() == mx::float32 && x.strides(2) == 1) {
      const float* const head = x.data<float>() + start + static_cast<int64_t>(h) * x.strides(1);
      std::memcpy(copy + h * dims, head, dims * sizeof(float));
      continue;
    }
    for (size_t i = 0; i < dims; ++i) {
      const int64_t at = start + static_cast<int64_t>(h) * x.strides(1) +
                         static_cast<int64_t>(i) * x.strides(2);
      if (x.dtype() == mx::float32) {
        copy[h * dims + i] = x.data<float>()[at];
      } else {
        kernels.from_bfloat16(x.data<uint16_t>() + at, copy + h * dims + i, 1);
      }
    }
  }
  return copy;
}

RopeTable::RopeTable(std::vector<double> its_frequencies, double its_magnitude)
    : frequencies(std::move(its_frequencies)), magnitude(its_magnitude) {
  const bool fits = !frequencies.empty() && frequencies.size() <= kMaxFrequencies;
  require<std::invalid_argument>(
      fits && std::ranges::all_of(frequencies, [](double x) { return std::isfinite(x); }),
      "frequencies must be numbers, 1 to ", kMaxFrequencies, " of them");
  require<std::invalid_argument>(
      magnitude > 0.0 && std::isfinite(magnitude), "magnitude must be a positive number");
}

void RopeTable::check_head_dim(int head_dim) const {
  require<std::invalid_argument>(
      2 * frequencies.size() <= static_cast<size_t>(head_dim), frequencies.size(),
      " frequencies do not turn heads of ", head_dim,
      " dimensions: there may be one for each two");
}

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
      token.shape(), token.dtype(), operation("append", Append{rows, layer, shape, workers}),
      {token, keys, values});
}

mx::array rope_angles(
    const Rows& rows, const Rope& rope, const Workers& workers) {
  const auto count = narrowed<int>("rows", rows->rows().size());
  return mx::array({count, narrowed<int>("angles", 2 * rope->frequencies.size())}, mx::float32,
                   operation("rope_angles", RopeAngles{rows, rope, workers}), {});
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
    require<std::invalid_argument>(angles->dtype() == mx::float32 && fits,
                                   "angles do not fit the rows, or are no float32");
    turning = static_cast<size_t>(angles->shape(1));
    in.push_back(row_by_row(*angles));
  }
  rows->require_writable();
  const auto results = mx::array::make_arrays(
      {token.shape(), queries.shape()}, {token.dtype(), queries.dtype()},
      operation("project_append", ProjectAppend{rows, layer, shape, eps, turning, workers}), in);
  return {results[0], results[1]};
}

}  // namespace quire::ops
