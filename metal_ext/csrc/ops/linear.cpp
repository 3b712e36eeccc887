#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "core/checked.h"
#include "cpu/packing.h"
#include "ops/layers.h"
#include "ops/packed_linear.h"
#include "ops/primitive.h"

// Computes linear layers, norms and gated MLPs over packed weights, on a CPU.
namespace quire::ops {
namespace {

struct Linear {
  static constexpr Results kResults = Results::rows;
  Packed packed;
  std::optional<float> eps;
  bool adds;
  Workers workers;

  // Allocates the results. Several results share one memory, each as a strided view of some heads:
  //   row 0  | queries .... | keys .. | values |
  //   row 1  | queries .... | keys .. | values |
  Arrays results(std::vector<mx::array>& out) const {
    if (out.size() == 1) {
      allocate(out[0]);
      return Arrays(out);
    }
    const int rows = out[0].shape(0);
    const int outputs = narrowed<int>("outputs", packed->shape().outputs);
    mx::array joined({rows, outputs}, mx::float32, nullptr, {});
    allocate(joined);
    int64_t begin = 0;
    for (mx::array& part : out) {
      const bool whole = rows == 1;
      const mx::Strides strides{outputs, part.shape(2), 1};
      part.copy_shared_buffer(joined, strides, {whole, whole, false},
                              whole ? part.size() : joined.size() - begin, begin);
      begin += int64_t{part.shape(1)} * part.shape(2);
    }
    return Arrays(std::move(joined));
  }

  // `in` has x, then the norm's weight and the residual if the layer has them.
  void run(const Arrays& in, Arrays& out) const {
    const cpu::LinearShape& shape = packed->shape();
    const float* const norm = eps ? in.floats(1) : nullptr;
    const float* const residual = adds ? in.back().data<float>() : nullptr;
    const auto held = workers->pool.hold();
    const auto rows = static_cast<size_t>(out[0].shape(0));
    float* const scratch = workers->pool.scratch(
        multiply_scratch(*packed, std::min(rows, cpu::kMaxRows), *workers));
    for_each_rows(rows, [&](size_t first, size_t count) {
      const float* const x = in.floats(0) + first * shape.inputs;
      const auto make_row = [&](size_t row, float* target) {
        if (norm != nullptr) {
          workers->kernels.layer.rms_norm(
              x + row * shape.inputs, norm, *eps, shape.inputs, target);
        } else {
          std::memcpy(target, x + row * shape.inputs, shape.inputs * sizeof(float));
        }
      };
      const size_t at = first * shape.outputs;
      multiply(*packed, count, make_row, scratch, residual == nullptr ? nullptr : residual + at,
               out.floats(0) + at, *workers);
    });
  }
};

struct GatedMlp {
  static constexpr Results kResults = Results::rows;
  Packed gate_up;
  Packed down;
  float eps;
  cpu::Gate kind;
  bool adds;  // whether x is added to the result
  Workers workers;

  void run(const Arrays& in, Arrays& out) const {
    const cpu::LayerKernels& kernels = workers->kernels.layer;
    const size_t hidden = gate_up->shape().inputs;
    const size_t inner = down->shape().inputs;
    const auto rows = static_cast<size_t>(out[0].shape(0));
    const size_t most = std::min(rows, cpu::kMaxRows);
    const auto held = workers->pool.hold();
    const size_t gates = whole_lines(most * 2 * inner);
    float* const both = workers->pool.scratch(
        gates + std::max(multiply_scratch(*gate_up, most, *workers),
                         multiply_scratch(*down, most, *workers)));
    for_each_rows(rows, [&](size_t first, size_t count) {
      const float* const x = in.floats(0) + first * hidden;
      const auto normed = [&](size_t row, float* target) {
        kernels.rms_norm(x + row * hidden, in.floats(1), eps, hidden, target);
      };
      multiply(*gate_up, count, normed, both + gates, nullptr, both, *workers);
      const auto gated = [&](size_t row, float* target) {
        const float* const gate = both + row * 2 * inner;
        kernels.gate(kind, gate, gate + inner, inner, target);
      };
      multiply(*down, count, gated, both + gates, adds ? x : nullptr,
               out.floats(0) + first * hidden, *workers);
    });
  }
};

struct RmsNorm {
  static constexpr Results kResults = Results::rows;
  float eps;
  Workers workers;

  // `in` has x, the weight, and the residual if there is one.
  void run(const Arrays& in, Arrays& out) const {
    const cpu::LayerKernels& kernels = workers->kernels.layer;
    const auto n = static_cast<size_t>(out[0].shape(1));
    for (size_t i = 0; i < out[0].size(); i += n) {
      kernels.rms_norm(in.floats(0) + i, in.floats(1), eps, n, out.floats(0) + i);
      if (in.size() > 2) {
        kernels.add(in.floats(2) + i, n, out.floats(0) + i);
      }
    }
  }
};

struct PackedRows {
  static constexpr Results kResults = Results::rows;
  Packed packed;
  Workers workers;

  void run(const Arrays& in, Arrays& out) const {
    const cpu::LinearShape& shape = packed->shape();
    const auto held = workers->pool.hold();
    workers->pool.run(in[0].size(), [&](size_t row, size_t) {
      const int32_t id = in[0].data<int32_t>()[row];
      float* const target = out.floats(0) + row * shape.inputs;
      if (id < 0 || static_cast<size_t>(id) >= shape.outputs) {
        std::fill_n(target, shape.inputs, std::numeric_limits<float>::quiet_NaN());
        return;
      }
      cpu::unpack(shape, packed->data(), static_cast<size_t>(id), target);
    });
  }
};

// Checks the residual, if there is one, and adds it to the inputs.
void add_residual(
    std::vector<mx::array>& in, const mx::array& x, const std::optional<mx::array>& residual,
    size_t numbers) {
  if (residual) {
    check_floats("the residual", *residual, numbers);
    if (residual->shape(0) != x.shape(0)) {
      throw std::invalid_argument("x and the residual have a different number of rows");
    }
    in.push_back(row_by_row(*residual));
  }
}

// Checks the inputs of a product, and returns them in the order that Linear::run() reads.
std::vector<mx::array> inputs_of(
    const mx::array& x, const cpu::LinearShape& shape, const std::optional<mx::array>& norm,
    const std::optional<mx::array>& residual) {
  check_floats("x", x, shape.inputs);
  std::vector<mx::array> in{row_by_row(x)};
  if (norm) {
    check_norm(*norm, shape.inputs);
    in.push_back(row_by_row(*norm));
  }
  add_residual(in, x, residual, shape.outputs);
  return in;
}

std::shared_ptr<mx::Primitive> primitive_of(
    const Packed& packed, bool normed, double eps, bool adds, const Workers& workers) {
  const auto own = normed ? std::optional(static_cast<float>(eps)) : std::nullopt;
  return operation("linear", Linear{packed, own, adds, workers});
}

}  // namespace

void check_floats(const char* name, const mx::array& x, size_t row_numbers) {
  const bool rows = x.ndim() >= 2 && x.shape(0) > 0 &&
                    x.size() == static_cast<size_t>(x.shape(0)) * row_numbers;
  if (!rows || x.dtype() != mx::float32) {
    throw std::invalid_argument(
        std::string(name) + " must be float32 rows of " + std::to_string(row_numbers) +
        " numbers");
  }
}

void check_norm(const mx::array& weight, size_t numbers) {
  if (weight.ndim() != 1 || weight.size() != numbers || weight.dtype() != mx::float32) {
    throw std::invalid_argument(
        "a norm's weight must be " + std::to_string(numbers) + " float32 numbers");
  }
}

mx::array linear(
    const mx::array& x, const Packed& packed, const Workers& workers,
    const std::optional<mx::array>& norm, double eps, const std::optional<mx::array>& residual) {
  const cpu::LinearShape& shape = packed->shape();
  std::vector<mx::array> in = inputs_of(x, shape, norm, residual);
  return mx::array({x.shape(0), narrowed<int>("outputs", shape.outputs)}, mx::float32,
                   primitive_of(packed, norm.has_value(), eps, residual.has_value(), workers),
                   std::move(in));
}

std::vector<mx::array> linear_heads(
    const mx::array& x, const Packed& packed, const Workers& workers,
    const std::vector<int64_t>& heads, const std::optional<mx::array>& norm, double eps,
    const std::optional<mx::array>& residual) {
  const cpu::LinearShape& shape = packed->shape();
  std::vector<mx::array> in = inputs_of(x, shape, norm, residual);
  size_t all = 0;
  for (const int64_t count : heads) {
    all += checked_between("heads", count, 1, static_cast<int64_t>(shape.outputs - all));
  }
  if (all == 0 || shape.outputs % all != 0) {
    throw std::invalid_argument("heads do not fit the layer's outputs");
  }
  const int head_dim = narrowed<int>("head_dim", shape.outputs / all);
  std::vector<mx::Shape> shapes;
  for (const int64_t count : heads) {
    shapes.push_back({x.shape(0), narrowed<int>("heads", count), head_dim});
  }
  return mx::array::make_arrays(
      std::move(shapes), std::vector<mx::Dtype>(heads.size(), mx::float32),
      primitive_of(packed, norm.has_value(), eps, residual.has_value(), workers), std::move(in));
}

mx::array gated_mlp(
    const mx::array& x, const mx::array& norm, double eps, const Packed& gate_up,
    const Packed& down, const Workers& workers, const std::string& gate, bool adds) {
  const size_t hidden = gate_up->shape().inputs;
  if (gate_up->shape().outputs != 2 * down->shape().inputs || down->shape().outputs != hidden) {
    throw std::invalid_argument("gate, up and down do not fit each other");
  }
  check_floats("x", x, hidden);
  check_norm(norm, hidden);
  return mx::array({x.shape(0), narrowed<int>("inputs", hidden)}, mx::float32,
                   operation("gated_mlp",
                             GatedMlp{gate_up, down, static_cast<float>(eps),
                                      cpu::gate_of(gate), adds, workers}),
                   {row_by_row(x), row_by_row(norm)});
}

mx::array rms_norm(
    const mx::array& x, const mx::array& weight, double eps, const Workers& workers,
    const std::optional<mx::array>& residual) {
  check_floats("x", x, weight.size());
  check_norm(weight, weight.size());
  std::vector<mx::array> in{row_by_row(x), row_by_row(weight)};
  add_residual(in, x, residual, weight.size());
  return mx::array({x.shape(0), weight.shape(0)}, mx::float32,
                   operation("rms_norm", RmsNorm{static_cast<float>(eps), workers}),
                   std::move(in));
}

mx::array packed_rows(const mx::array& ids, const Packed& packed, const Workers& workers) {
  if (ids.dtype() != mx::int32 || ids.ndim() != 1) {
    throw std::invalid_argument("ids must be int32 [T]");
  }
  return mx::array({ids.shape(0), narrowed<int>("inputs", packed->shape().inputs)}, mx::float32,
                   operation("packed_rows", PackedRows{packed, workers}), {row_by_row(ids)});
}

}  // namespace quire::ops
