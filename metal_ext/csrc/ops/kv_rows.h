#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/kernels.h"
#include "mlx/array.h"
#include "ops/checks.h"

// How arrays [T, heads, head_dim] and rows of a region are read and written on the CPU.
namespace quire::ops {

// Throws std::invalid_argument where the range's memory is a device's.
void check_on_host(const AddressRange& range);

cpu::KVType kv_type_of(mx::Dtype type);

// Throws std::invalid_argument unless x is [rows, heads, head_dim] of float32 or bfloat16.
void check_rows_array(const char* name, const mx::array& x);

// Checks that both regions of the layer exist and hold rows of that shape.
cpu::HeadShape check_layer(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads,
    int64_t head_dim);

// Row `row` of x as float32 [heads * head_dim]: x's own memory where it is that already, otherwise
// copied into `copy`.
const float* row_as_floats(
    const mx::array& x, size_t row, const cpu::Kernels& kernels, float* copy);

// Calls body(row, worker) for every row, a few of them as one task. The caller holds the pool.
template <class Body>
void for_each_row(ThreadPool& pool, size_t rows, const Body& body) {
  constexpr size_t kRowsPerTask = 16;
  pool.run((rows + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task, size_t worker) {
    const size_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (size_t row = task * kRowsPerTask; row < end; ++row) {
      body(row, worker);
    }
  });
}

// Writes [kv_heads * head_dim] float32 to a row's place in a region, as the region keeps them.
void write_row(
    const RowTable::Row& place, int64_t region, const float* source, const cpu::HeadShape& shape,
    const cpu::Kernels& kernels);

}  // namespace quire::ops
