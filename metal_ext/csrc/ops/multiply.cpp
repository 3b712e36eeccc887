#include "ops/multiply.h"

#include <algorithm>
#include <vector>

#include "ops/primitive.h"

namespace quire::ops {
namespace {

// Weights that one task reads where many rows go by: few enough to stay in a core's cache.
constexpr size_t kTaskBytes = size_t{256} << 10;
// Rows that go by at once, so that weights need not stay.
constexpr size_t kFewRows = 16;
// Rows that one task prepares at most.
constexpr size_t kPreparedRows = 16;

// The scratch of a call: a row that each thread makes, and all of them as the kernels read them.
struct Scratch {
  size_t row_floats;
  float* rows;  // [threads][row_floats]
  std::byte* prepared;

  Scratch(const PackedLinear& packed, const CpuWorkers& workers, float* memory)
      : row_floats(whole_lines(packed.shape().inputs)),
        rows(memory),
        prepared(reinterpret_cast<std::byte*>(memory + workers.pool.threads() * row_floats)) {}
};

// Panels that one thread multiplies without a look at what others do.
struct Task {
  size_t product;
  size_t first;
  size_t panels;
};

// Whole runs of panels that are read at the same time, of one product each. A task takes its part
// of half of what is left (guided self-scheduling, Polychronopoulos and Kuck, 1987): memory is read
// in long stretches at first, and threads end together.
std::vector<Task> tasks_of(std::span<const Product> products, size_t threads) {
  const auto cost = [](const Product& its) { return its.rows * its.shape->panel_bytes(); };
  size_t left = 0;
  for (const Product& its : products) {
    left += its.shape->panels() * cost(its);
  }
  std::vector<Task> tasks;
  for (size_t number = 0; number < products.size(); ++number) {
    const Product& its = products[number];
    const size_t all = its.shape->panels();
    const size_t most = its.rows <= kFewRows ? all : kTaskBytes / its.shape->panel_bytes();
    for (size_t done = 0; done < all;) {
      const size_t fair = std::min(most, left / cost(its) / (2 * threads));
      const size_t wanted = std::max(fair / cpu::kMostPanels, size_t{1}) * cpu::kMostPanels;
      const size_t panels = std::min(wanted, all - done);
      tasks.push_back({number, done, panels});
      done += panels;
      left -= panels * cost(its);
    }
  }
  return tasks;
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

  const size_t rows_at_once = std::clamp<size_t>(rows / pool.threads(), 1, kPreparedRows);
  const auto prepare = [&](size_t row, size_t worker) {
    float* const target = scratch.rows + worker * scratch.row_floats;
    make_row(row, target);
    kernels.prepare(shape, target, row, scratch.prepared);
  };
  const bool many = kernels.prepared_bytes(shape, rows) >= kParallelBytes;
  pool.run_in_groups(rows, rows_at_once, prepare, many);

  const Product product{&shape, packed.data(), scratch.prepared, rows, out, residual};
  multiply_all({&product, 1}, workers);
}

void multiply_all(std::span<const Product> products, CpuWorkers& workers) {
  const std::vector<Task> tasks = tasks_of(products, workers.pool.threads());
  const auto multiply = [&](size_t number, size_t) {
    const Task& task = tasks[number];
    const Product& its = products[task.product];
    const cpu::LinearShape& shape = *its.shape;
    workers.kernels.linear.multiply(shape, its.packed, its.prepared, its.rows, task.first,
                                    task.panels, its.out, shape.outputs);
    if (its.residual != nullptr) {
      const size_t from = task.first * cpu::kPanelOutputs;
      const size_t count = std::min(task.panels * cpu::kPanelOutputs, shape.outputs - from);
      for (size_t row = 0; row < its.rows; ++row) {
        const size_t at = row * shape.outputs + from;
        workers.kernels.layer.add(its.residual + at, count, its.out + at);
      }
    }
  };
  size_t bytes = 0;
  for (const Product& its : products) {
    bytes += its.rows * its.shape->packed_bytes();
  }
  workers.pool.run(tasks.size(), multiply, bytes >= kParallelBytes);
}

}  // namespace quire::ops
