#pragma once

#include <cstddef>
#include <cstdint>

#include "core/checked.h"
#include "core/geometry.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "ops/ops.h"

// The checks of arguments that come before an operation is made.
namespace quire::ops {

// Throws std::invalid_argument unless x is float32 of that shape.
void check_float32(const char* name, const mx::array& x, const mx::Shape& shape);
// Throws std::invalid_argument unless x is [rows, heads, head_dim].
void check_rows_shape(const char* name, const mx::array& x);
// Throws std::invalid_argument unless x has one row for each of the table's.
void check_row_count(const char* name, const mx::array& x, const RowTable& rows);
// Throws std::invalid_argument unless keys and values have one shape.
void check_same_shape(const mx::array& keys, const mx::array& values);
// Throws std::invalid_argument unless queries, keys and values, [rows, heads, head_dim] each, fit
// each other and the table's rows.
void check_projected(
    const mx::array& queries, const mx::array& keys, const mx::array& values,
    const RowTable& rows);
// Checks that both regions of the layer exist and that query heads can share KV heads.
void check_heads(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads);
// Checks that both regions of the layer hold rows of `row_bytes` bytes.
void check_row_bytes(const Geometry& geometry, const Layer& layer, size_t row_bytes);
// Checks a view of the first `tokens` rows of a region: that they are mapped, and of that shape,
// [tokens, kv_heads, head_dim]. Returns it.
mx::Shape check_view(
    const AddressRange& range, int64_t region, int64_t tokens, int64_t kv_heads, int64_t head_dim,
    mx::Dtype type);
// Checks that the first `tokens` rows of a block can be copied into another range's; returns how
// many bytes these are.
size_t check_block_copy(
    const AddressRange& source, int64_t source_block, const AddressRange& target,
    int64_t target_block, int64_t tokens);

// Throws std::invalid_argument unless both weights are [head_dim] float32.
void check_norms(const std::optional<QKNorms>& norms, int head_dim);

// Makes a view show memory, row by row, from an offset in bytes on.
void show(mx::array& view, mx::allocator::Data memory, size_t offset);

// --- on the CPU ----------------------------------------------------------------------------------

// Throws std::invalid_argument where the range's memory is a device's.
void check_on_host(const AddressRange& range);
// Throws std::invalid_argument unless x is [rows, heads, head_dim] of float32 or bfloat16.
void check_rows_array(const char* name, const mx::array& x);
// Checks that both regions of the layer exist and hold rows of that shape.
cpu::HeadShape check_layer(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads,
    int64_t head_dim);

}  // namespace quire::ops
