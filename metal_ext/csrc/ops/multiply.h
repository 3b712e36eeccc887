#pragma once
#include <cstddef>
#include <functional>
#include <span>

#include "ops/packed_linear.h"

namespace quire::ops {

// Makes row `row` of what is multiplied, [inputs] float32, in `target`.
using MakeRow = std::function<void(size_t row, float* target)>;

// Floats of scratch that multiply() needs for so many rows.
size_t multiply_scratch(const PackedLinear& packed, size_t rows, const CpuWorkers& workers);

// out [rows][outputs] = x . W^T for 1 to kMaxRows rows, plus `residual` [rows][outputs] where there
// is one. The caller holds the pool. scratch: on a cache line.
void multiply(
    const PackedLinear& packed, size_t rows, const MakeRow& make_row, float* scratch,
    const float* residual, float* out, CpuWorkers& workers);

// Rows, prepared as the kernels read them, times a matrix: out [rows][outputs], plus `residual`
// where there is one. rows: 1 to kMaxRows.
struct Product {
  const cpu::LinearShape* shape;
  const std::byte* packed;
  const std::byte* prepared;
  size_t rows;
  float* out;
  const float* residual = nullptr;
};

// Multiplies all of them, in one queue of tasks for all threads. The caller holds the pool.
void multiply_all(std::span<const Product> products, CpuWorkers& workers);

// Calls body(first, count) for all rows, as many at a time as multiply() takes.
template <class Body>
void for_each_rows(size_t rows, const Body& body) {
  for (size_t first = 0; first < rows; first += cpu::kMaxRows) {
    body(first, rows - first < cpu::kMaxRows ? rows - first : cpu::kMaxRows);
  }
}

}  // namespace quire::ops
