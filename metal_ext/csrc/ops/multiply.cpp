#include "ops/multiply.h"

#include <algorithm>

namespace quire::ops {
namespace {

// Weights that one task reads: enough to be worth a task, and few enough to stay in a core's cache
// while many rows go by.
constexpr size_t kTaskBytes = size_t{256} << 10;
constexpr size_t kTaskPanels = 8;  // at least, and a multiple of it: kernels take as many at once
// Rows that one task prepares at most.
constexpr size_t kPreparedRows = 16;
// Below this many bytes a helper would be woken for less time than waking takes.
constexpr size_t kParallelBytes = size_t{128} << 10;
constexpr size_t kLineFloats = 16;

// The scratch of a call: a row that each thread makes, and all of them as the kernels read them.
struct Scratch {
  size_t row_floats;
  float* rows;  // [threads][row_floats]
  std::byte* prepared;

  Scratch(const PackedLinear& packed, const CpuWorkers& workers, float* memory)
      : row_floats(cpu::rounded_up(packed.shape().inputs, kLineFloats)),
        rows(memory),
        prepared(reinterpret_cast<std::byte*>(memory + workers.pool.threads() * row_floats)) {}
};

}  // namespace

size_t multiply_scratch(const PackedLinear& packed, size_t rows, const CpuWorkers& workers) {
  const Scratch scratch(packed, workers, nullptr);
  const size_t bytes = workers.kernels.linear.prepared_bytes(packed.shape(), rows);
  return workers.pool.threads() * scratch.row_floats + (bytes + sizeof(float) - 1) / sizeof(float);
}

void multiply(
    const PackedLinear& packed, size_t rows, const MakeRow& make_row, float* memory,
    const float* residual, float* out, CpuWorkers& workers) {
  const cpu::LinearShape& shape = packed.shape();
  const cpu::LinearKernels& kernels = workers.kernels.linear;
  ThreadPool& pool = workers.pool;
  const Scratch scratch(packed, workers, memory);

  const size_t fair = rows / pool.threads();
  const size_t rows_at_once = std::clamp<size_t>(fair, 1, kPreparedRows);
  const auto prepare = [&](size_t task, size_t worker) {
    float* const made = scratch.rows + worker * scratch.row_floats;
    const size_t end = std::min(rows, (task + 1) * rows_at_once);
    for (size_t row = task * rows_at_once; row < end; ++row) {
      make_row(row, made);
      kernels.prepare(shape, made, row, scratch.prepared);
    }
  };
  const bool many = kernels.prepared_bytes(shape, rows) >= kParallelBytes;
  pool.run((rows + rows_at_once - 1) / rows_at_once, prepare, many);

  const size_t wanted = kTaskBytes / shape.panel_bytes() / kTaskPanels * kTaskPanels;
  const size_t task_panels = std::max(wanted, kTaskPanels);
  const auto multiply = [&](size_t task, size_t) {
    const size_t first = task * task_panels;
    const size_t panels = std::min(task_panels, shape.panels() - first);
    kernels.multiply(shape, packed.data(), scratch.prepared, rows, first, panels, out,
                     shape.outputs);
    if (residual != nullptr) {
      const size_t from = first * cpu::kPanelOutputs;
      const size_t count = std::min(panels * cpu::kPanelOutputs, shape.outputs - from);
      for (size_t row = 0; row < rows; ++row) {
        const size_t at = row * shape.outputs + from;
        workers.kernels.layer.add(residual + at, count, out + at);
      }
    }
  };
  pool.run((shape.panels() + task_panels - 1) / task_panels, multiply,
           rows * shape.packed_bytes() >= kParallelBytes);
}

}  // namespace quire::ops
