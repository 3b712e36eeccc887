#pragma once

#include <stdexcept>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/device.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "ops/ops.h"

// The base of the CPU's operations, which are nodes of MLX's graph.
namespace quire::ops {

// The number of floats in a cache line. Intermediate results are aligned to cache lines.
constexpr size_t kLineFloats = 16;
// Work on fewer bytes runs on one thread, because waking a helper would take longer.
constexpr size_t kParallelBytes = size_t{128} << 10;

constexpr size_t whole_lines(size_t floats) { return cpu::rounded_up(floats, kLineFloats); }

// Allocates a result. Throws std::runtime_error if memory is short, which MLX does not check.
inline void allocate(mx::array& result) {
  mx::allocator::Data memory = mx::allocator::malloc(result.nbytes());
  require<std::runtime_error>(memory.buffer().ptr() != nullptr,
                              "the system has no memory for a result of ", result.nbytes(),
                              " bytes");
  result.set_data(std::move(memory));
}

// The inputs or results of a task. MLX keeps the arrays alive until the task has run.
class Arrays {
 public:
  explicit Arrays(const std::vector<mx::array>& arrays) {
    for (const mx::array& x : arrays) {
      arrays_.push_back(mx::array::unsafe_weak_copy(x));
    }
  }
  explicit Arrays(mx::array kept) : arrays_{std::move(kept)} {}

  size_t size() const { return arrays_.size(); }
  const mx::array& operator[](size_t i) const { return arrays_[i]; }
  mx::array& operator[](size_t i) { return arrays_[i]; }
  const mx::array& back() const { return arrays_.back(); }
  const float* floats(size_t i) const { return arrays_[i].data<float>(); }
  float* floats(size_t i) { return arrays_[i].data<float>(); }

 private:
  std::vector<mx::array> arrays_;
};

// Says how results lie in memory, and whether the first result is the ordering handle (ops.h).
enum class Results {
  rows,   // arrays that lie row by row, as row_by_row() returns them
  plain,  // arrays in any other order
  token,  // the first is the ordering handle (ops.h) of the inputs
};

class CpuPrimitive : public mx::Primitive {
 public:
  explicit CpuPrimitive(const char* name, bool gives_rows = false)
      : Primitive(mx::default_stream(mx::default_device())), name_(name), gives_rows_(gives_rows) {}

  const char* name() const override { return name_; }
  bool gives_rows() const { return gives_rows_; }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(message(
        name_, " has rows on the CPU, but a GPU stream: run the model on the CPU "
               "(mlx.core.set_default_device(mlx.core.cpu))"));
  }

 private:
  const char* name_;
  bool gives_rows_;
};

// An operation that runs as one task. work.run(inputs, results) runs on the CPU stream's thread
// after all earlier tasks. work.results(out), if it exists, allocates the results.
template <class Work>
class Operation final : public CpuPrimitive {
 public:
  Operation(const char* name, Work work)
      : CpuPrimitive(name, Work::kResults == Results::rows), work_(std::move(work)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    mx::cpu::get_command_encoder(stream()).dispatch(
        [work = work_, inputs = Arrays(in), results = results_of(in, out)]() mutable {
          work.run(inputs, results);
        });
  }

 private:
  Arrays results_of(const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    if constexpr (requires { work_.results(out); }) {
      return work_.results(out);
    }
    constexpr bool kHasToken = Work::kResults == Results::token;
    if (kHasToken) {
      out[0].copy_shared_buffer(in[0]);
    }
    for (size_t i = kHasToken ? 1 : 0; i < out.size(); ++i) {
      allocate(out[i]);
    }
    return Arrays(out);
  }

  Work work_;
};

template <class Work>
std::shared_ptr<mx::Primitive> operation(const char* name, Work work) {
  return std::make_shared<Operation<Work>>(name, std::move(work));
}

// Returns x in row-major order. If x has this order already, no node is added to MLX's graph,
// because each node costs MLX two more tasks.
inline mx::array row_by_row(const mx::array& x) {
  if (x.status() != mx::array::Status::unscheduled) {
    return x.flags().row_contiguous ? x : mx::contiguous(x);
  }
  if (!x.siblings().empty() || !x.has_primitive()) {
    return mx::contiguous(x);
  }
  const auto* primitive = dynamic_cast<const CpuPrimitive*>(&x.primitive());
  return primitive != nullptr && primitive->gives_rows() ? x : mx::contiguous(x);
}

// Returns a row of x [rows, heads, head_dim] in float32: x's memory, or a conversion in `copy`.
const float* row_as_floats(
    const mx::array& x, size_t row, const cpu::Kernels& kernels, float* copy);

}  // namespace quire::ops
