#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/checked.h"
#include "core/geometry.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "ops/ops.h"

// Checks of operations' arguments, which throw std::invalid_argument or std::out_of_range.
namespace quire::ops {

void check_float32(const char* name, const mx::array& x, const mx::Shape& shape);
// Checks that x is [rows, heads, head_dim].
void check_rows_shape(const char* name, const mx::array& x);
// Checks that x has one row for each row of the table.
void check_row_count(const char* name, const mx::array& x, const RowTable& rows);
void check_same_shape(const mx::array& keys, const mx::array& values);
// Checks that queries, keys and values are [rows, heads, head_dim] and fit the table's rows.
void check_projected(
    const mx::array& queries, const mx::array& keys, const mx::array& values,
    const RowTable& rows);
// Checks that the layer's regions exist, and that query heads divide evenly among KV heads.
void check_heads(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads);
void check_row_bytes(const Geometry& geometry, const Layer& layer, size_t row_bytes);
// Checks that a region's rows [first, tokens) are mapped. Returns their shape, and their offset
// from the region's start in bytes.
std::pair<mx::Shape, size_t> check_view(
    const AddressRange& range, int64_t region, int64_t first, int64_t tokens, int64_t kv_heads,
    int64_t head_dim, mx::Dtype type);
// Checks the arguments for a copy of a block's first `tokens` rows. Returns the bytes to copy.
size_t check_block_copy(
    const AddressRange& source, int64_t source_block, const AddressRange& target,
    int64_t target_block, int64_t tokens);

// Checks that both weights are [head_dim] float32.
void check_norms(const std::optional<QKNorms>& norms, int head_dim);

// Makes `view` an array of the memory from `offset` bytes on, without gaps between rows.
void show(mx::array& view, mx::allocator::Data memory, size_t offset);

// Throws std::invalid_argument for a range in a GPU's memory.
void check_on_host(const AddressRange& range);
// Checks that x is [rows, heads, head_dim] of float32 or bfloat16.
void check_rows_array(const char* name, const mx::array& x);
// Checks that the layer's regions have rows of these heads, and that there are kernels for them.
cpu::HeadShape check_layer(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads,
    int64_t head_dim);

}  // namespace quire::ops
