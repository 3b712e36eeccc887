#include "ops/gated_delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "ops/checks.h"
#include "ops/primitive.h"

// Computes gated delta nets (recurrent layers), on a CPU.
namespace quire::ops {
namespace {

using Part = StateRows::Part;
using Run = StateRows::Run;
using Tile = StateRows::Tile;

// The epsilon added to the sum of squares of a head's query or key. All models have the same one.
constexpr float kUnitEps = 1e-6f;
// The number of heads that one task convolves.
constexpr size_t kHeadsPerTask = 8;
constexpr size_t kMaxTaps = 8;

constexpr int64_t kMaxHeads = 256;
constexpr int64_t kMaxDim = 256;
constexpr int64_t kDimStep = 16;  // a multiple of every instruction set's vectors
constexpr int64_t kMaxTailRows = 7;

size_t checked_dim(const char* name, int64_t dim) {
  checked_between(name, dim, kDimStep, kMaxDim);
  require<std::invalid_argument>(
      dim % kDimStep == 0, name, " is ", dim, "; it must be a multiple of 16");
  return static_cast<size_t>(dim);
}

// Rows [T, n] of an array with any row stride. Rows whose numbers are not adjacent are copied.
class RowsOf {
 public:
  explicit RowsOf(const mx::array& x) : width_(static_cast<size_t>(x.shape(1))) {
    const float* const data = x.data<float>();
    if (x.strides(1) == 1 || width_ == 1) {
      first_ = data;
      stride_ = x.strides(0);
      return;
    }
    for (int64_t row = 0; row < x.shape(0); ++row) {
      for (int64_t i = 0; i < x.shape(1); ++i) {
        copy_.push_back(data[row * x.strides(0) + i * x.strides(1)]);
      }
    }
    first_ = copy_.data();
    stride_ = static_cast<int64_t>(width_);
  }
  const float* row(size_t number) const {
    return first_ + static_cast<int64_t>(number) * stride_;
  }

 private:
  size_t width_;
  const float* first_;
  int64_t stride_;
  std::vector<float> copy_;
};

// Computes one layer for a step's rows, tile by tile. First convolves all heads into scratch
// [kTileRows][conv_width], and normalises queries and keys. Then finishes each value head.
class LayerStep {
 public:
  LayerStep(
      const GatedDelta& delta, size_t offset, const Arrays& in, float* out,
      const cpu::Kernels& kernels, float* scratch)
      : shape_(delta.shape),
        eps_(static_cast<float>(delta.eps)),
        offset_(offset),
        qkv_(in[1]),
        z_(in[2]),
        a_(in[3]),
        b_(in[4]),
        conv_(in.floats(5)),
        a_log_(in.floats(6)),
        dt_bias_(in.floats(7)),
        norm_(in.floats(8)),
        out_(out),
        kernels_(kernels),
        convolved_(scratch) {}

  size_t convolved_heads() const { return 2 * shape_.key_heads + shape_.value_heads; }

  // Convolves one head. Heads are numbered: first those of queries, then of keys, then of values.
  void convolve(const Tile& tile, size_t head) const {
    const size_t key_heads = shape_.key_heads;
    const bool is_value = head >= 2 * key_heads;
    const size_t dims = is_value ? shape_.value_dim : shape_.key_dim;
    const size_t channel =
        is_value ? 2 * shape_.keys_width() + (head - 2 * key_heads) * dims : head * dims;
    const size_t taps = shape_.tail_rows + 1;
    for (const Part& part : tile.parts) {
      for (size_t row = part.first; row < part.first + part.count; ++row) {
        const float* inputs[kMaxTaps];
        for (size_t tap = 0; tap < taps; ++tap) {
          const float* const input = conv_input(part, row - part.segment_first + tap);
          inputs[tap] = input == nullptr ? nullptr : input + channel;
        }
        float* const target = convolved_ + (row - tile.first) * shape_.conv_width() + channel;
        kernels_.delta.convolve(inputs, conv_ + channel, taps, shape_.conv_width(), dims, target);
        if (!is_value) {
          const float scale = head < key_heads ? 1.0f / std::sqrt(static_cast<float>(dims)) : 1.0f;
          kernels_.delta.normalize(target, kUnitEps, scale, dims, target);
        }
      }
    }
  }

  // Runs a value head's recurrence, norm and gate on a part. Writes the head's share of the tails.
  // The state after drafts is not kept: the kernel writes it to `lost`, and no code reads it.
  void finish(const Tile& tile, const Part& part, size_t head, float* lost) const {
    const size_t key_head = head / (shape_.value_heads / shape_.key_heads);
    const size_t value_dim = shape_.value_dim;
    float decays[StateRows::kTileRows];
    float betas[StateRows::kTileRows];
    for (size_t i = 0; i < part.count; ++i) {
      set_gates(part.first + i, head, decays[i], betas[i]);
    }
    for (const Run& run : part.runs) {
      const float* const queries =
          convolved_ + (run.first - tile.first) * shape_.conv_width() + key_head * shape_.key_dim;
      const float* const values = convolved_ + (run.first - tile.first) * shape_.conv_width() +
                                  2 * shape_.keys_width() + head * value_dim;
      const size_t at = run.first - part.first;
      kernels_.delta.recur(
          {shape_.key_dim, value_dim},
          {run.count, state(run.from, head), run.to == nullptr ? lost : state(run.to, head),
           queries, queries + shape_.keys_width(), values, shape_.conv_width(), decays + at,
           betas + at, row_out(run.first, head), shape_.values_width()});
      if (run.written) {
        write_tail(part, run, head);
      }
    }
    for (size_t row = part.first; row < part.first + part.count; ++row) {
      float* const y = row_out(row, head);
      kernels_.layer.rms_norm(y, norm_, eps_, value_dim, y);
      kernels_.layer.gate(cpu::Gate::silu, z_.row(row) + head * value_dim, y, value_dim, y);
    }
  }

 private:
  // Sets decay = exp(-exp(a_log) softplus(a + dt_bias)) and beta = sigmoid(b).
  void set_gates(size_t row, size_t head, float& decay, float& beta) const {
    const double x = static_cast<double>(a_.row(row)[head]) + dt_bias_[head];
    const double softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
    decay = static_cast<float>(std::exp(-std::exp(static_cast<double>(a_log_[head])) * softplus));
    beta = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(b_.row(row)[head]))));
  }

  float* row_out(size_t row, size_t head) const {
    return out_ + row * shape_.values_width() + head * shape_.value_dim;
  }

  const float* state(const std::byte* slot, size_t head) const {
    return slot == nullptr ? nullptr
                           : reinterpret_cast<const float*>(slot + offset_) +
                                 head * shape_.head_numbers();
  }
  float* state(std::byte* slot, size_t head) const {
    return reinterpret_cast<float*>(slot + offset_) + head * shape_.head_numbers();
  }

  // Returns row `place` of the tail's rows followed by the segment's rows, or null for a zero row.
  const float* conv_input(const Part& part, size_t place) const {
    if (place >= shape_.tail_rows) {
      return qkv_.row(part.segment_first + place - shape_.tail_rows);
    }
    return part.read == nullptr
               ? nullptr
               : reinterpret_cast<const float*>(part.read + offset_ + shape_.state_bytes()) +
                     place * shape_.conv_width();
  }

  // Writes the convolution's newest input rows (the tail) to the run's slot. Rows are copied in
  // rising order, because the old tail, from which some are read, may be in the same slot.
  void write_tail(const Part& part, const Run& run, size_t head) const {
    const size_t width = shape_.conv_width();
    const size_t begin = width * head / shape_.value_heads;
    const size_t bytes = (width * (head + 1) / shape_.value_heads - begin) * sizeof(float);
    float* const tail = reinterpret_cast<float*>(run.to + offset_ + shape_.state_bytes());
    const size_t rows = run.first + run.count - part.segment_first;
    for (size_t i = 0; i < shape_.tail_rows; ++i) {
      const float* const source = conv_input(part, rows + i);
      float* const target = tail + i * width + begin;
      if (source == nullptr) {
        std::memset(target, 0, bytes);
      } else {
        std::memcpy(target, source + begin, bytes);
      }
    }
  }

  const DeltaShape& shape_;
  const float eps_;
  const size_t offset_;
  const RowsOf qkv_, z_, a_, b_;
  const float* const conv_;
  const float* const a_log_;
  const float* const dt_bias_;
  const float* const norm_;
  float* const out_;
  const cpu::Kernels& kernels_;
  float* const convolved_;
};

struct GatedDeltaStep {
  static constexpr Results kResults = Results::token;
  Delta delta;
  SlotRows rows;
  size_t offset;
  Workers workers;

  // `in` has the ordering handle (ops.h), qkv, z, a, b, conv, a_log, dt_bias, norm.
  void run(const Arrays& in, Arrays& out) const {
    const auto held = workers->pool.hold();
    const size_t lost = whole_lines(delta->shape.head_numbers());
    const size_t tile_rows = std::min(rows->size(), StateRows::kTileRows);
    const size_t convolved = tile_rows * delta->shape.conv_width();
    float* const scratch =
        workers->pool.scratch(whole_lines(convolved) + workers->pool.threads() * lost);
    const LayerStep step(*delta, offset, in, out.floats(1), workers->kernels, scratch);
    const size_t value_heads = delta->shape.value_heads;
    for (const Tile& tile : rows->tiles()) {
      workers->pool.run_in_groups(
          step.convolved_heads(), kHeadsPerTask,
          [&](size_t head, size_t) { step.convolve(tile, head); });
      workers->pool.run(tile.parts.size() * value_heads, [&](size_t task, size_t worker) {
        step.finish(tile, tile.parts[task / value_heads], task % value_heads,
                    scratch + whole_lines(convolved) + worker * lost);
      });
    }
  }
};

}  // namespace

DeltaShape::DeltaShape(
    int64_t all_value_heads, int64_t all_key_heads, int64_t dims_of_key, int64_t dims_of_value,
    int64_t rows_of_tail)
    : value_heads(checked_between("value_heads", all_value_heads, 1, kMaxHeads)),
      key_heads(checked_between("key_heads", all_key_heads, 1, all_value_heads)),
      key_dim(checked_dim("key_dim", dims_of_key)),
      value_dim(checked_dim("value_dim", dims_of_value)),
      tail_rows(checked_between("tail_rows", rows_of_tail, 1, kMaxTailRows)) {
  require<std::invalid_argument>(value_heads % key_heads == 0, value_heads,
                                 " value heads cannot share ", key_heads, " key heads evenly");
}

GatedDelta::GatedDelta(
    const DeltaShape& its_shape, mx::array its_conv, mx::array its_a_log, mx::array its_dt_bias,
    mx::array its_norm, double its_eps)
    : shape(its_shape),
      conv(std::move(its_conv)),
      a_log(std::move(its_a_log)),
      dt_bias(std::move(its_dt_bias)),
      norm(std::move(its_norm)),
      eps(its_eps) {
  const auto heads = narrowed<int>("value_heads", shape.value_heads);
  check_float32("conv", conv, {narrowed<int>("taps", shape.tail_rows + 1),
                                narrowed<int>("conv_width", shape.conv_width())});
  check_float32("a_log", a_log, {heads});
  check_float32("dt_bias", dt_bias, {heads});
  check_float32("norm", norm, {narrowed<int>("value_dim", shape.value_dim)});
}

void check_delta(
    const DeltaShape& shape, const std::vector<mx::array>& arrays, size_t rows, int64_t offset) {
  constexpr const char* kNames[] = {"qkv", "z", "a", "b"};
  const size_t widths[] = {
      shape.conv_width(), shape.values_width(), shape.value_heads, shape.value_heads};
  for (size_t i = 0; i < arrays.size(); ++i) {
    const mx::array& x = arrays[i];
    require<std::invalid_argument>(
        x.ndim() == 2 && static_cast<size_t>(x.shape(0)) == rows &&
            static_cast<size_t>(x.shape(1)) == widths[i],
        kNames[i], " must be [", rows, ", ", widths[i], "], a row for each of the states' rows");
  }
  require<std::invalid_argument>(offset % static_cast<int64_t>(sizeof(float)) == 0, "offset is ",
                                 offset, "; it must be a multiple of 4");
}

std::pair<mx::array, mx::array> gated_delta(
    const mx::array& token, const mx::array& qkv, const mx::array& z, const mx::array& a,
    const mx::array& b, const Delta& delta, const SlotRows& rows, int64_t offset,
    const Workers& workers) {
  const DeltaShape& shape = delta->shape;
  rows->require_room(offset, shape.state_bytes() + shape.tail_bytes(sizeof(float)));
  check_delta(shape, {qkv, z, a, b}, rows->size(), offset);
  for (const mx::array& x : {qkv, z, a, b}) {
    require<std::invalid_argument>(
        x.dtype() == mx::float32, "qkv, z, a and b must be float32 on the CPU");
  }
  const auto results = mx::array::make_arrays(
      {token.shape(), z.shape()}, {token.dtype(), mx::float32},
      operation("gated_delta", GatedDeltaStep{delta, rows, static_cast<size_t>(offset), workers}),
      {token, qkv, z, a, b, row_by_row(delta->conv), row_by_row(delta->a_log),
       row_by_row(delta->dt_bias), row_by_row(delta->norm)});
  return {results[0], results[1]};
}

}  // namespace quire::ops
