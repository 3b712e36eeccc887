#include "ops/multiply.h"

#include <algorithm>
#include <vector>

namespace quire::ops {
namespace {

// Weights that one task reads where many rows go by: few enough to stay in a core's cache.
constexpr size_t kTaskBytes = size_t{256} << 10;
// Rows that go by at once, so that weights need not stay.
constexpr size_t kFewRows = 16;
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

// Where each task's panels end: whole runs of those that are read at the same time. A task takes
// its part of half of what is left (guided self-scheduling, Polychronopoulos and Kuck, 1987):
// memory is read in long stretches at first, and threads end together.
std::vector<size_t> task_ends(const cpu::LinearShape& shape, size_t rows, size_t threads) {
  const size_t most = rows <= kFewRows ? shape.panels() : kTaskBytes / shape.panel_bytes();
  std::vector<size_t> ends;
  for (size_t done = 0; done < shape.panels();) {
    const size_t fair = std::min(most, (shape.panels() - done) / (2 * threads));
    done += std::max(fair / cpu::kMostPanels, size_t{1}) * cpu::kMostPanels;
    ends.push_back(std::min(done, shape.panels()));
  }
  return ends;
}

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

  const std::vector<size_t> ends = task_ends(shape, rows, pool.threads());
  const auto multiply = [&](size_t task, size_t) {
    const size_t first = task == 0 ? 0 : ends[task - 1];
    const size_t panels = ends[task] - first;
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
  pool.run(ends.size(), multiply, rows * shape.packed_bytes() >= kParallelBytes);
}

}  // namespace quire::ops
