#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/address_range.h"
#include "core/mapper.h"
#include "mlx/array.h"
#include "mlx/dtype.h"
#include "ops/gated_delta.h"
#include "ops/metal/rows.h"
#include "ops/ops.h"

// MLX primitives over the rows of a MetalSubstrate. The rules of the cache token are those of
// ops/ops.h. Arrays are float32, float16 or bfloat16, layers keep any of these, and head_dim is 64,
// 128 or 256. What is made after the rows' step_end, or evaluated after it, is a std::logic_error.
namespace quire::ops::device {

mx::array append(
    const mx::array& token, const mx::array& keys, const mx::array& values,
    const DeviceRows& rows, const Layer& layer, const DeviceMemory& substrate);

mx::array decode_attention(
    const mx::array& token, const mx::array& queries, const DeviceRows& rows, int64_t first_row,
    const Layer& layer, int64_t kv_heads, double scale, const DeviceMemory& substrate);

// RMS norm and RoPE (halves) of queries and keys, each where it is given, and append().
// queries: [T, query_heads, head_dim], keys, values: [T, kv_heads, head_dim], all of one type.
// Returns the new token, and the queries.
std::pair<mx::array, mx::array> project_append(
    const mx::array& token, const mx::array& queries, const mx::array& keys,
    const mx::array& values, const std::optional<QKNorms>& norms,
    const std::optional<Rope>& rope,
    const DeviceRows& rows, const Layer& layer, const DeviceMemory& substrate);

// The first `tokens` rows of a segment's range: keys and values, [tokens, kv_heads, head_dim] of
// the layer's type, copied.
std::pair<mx::array, mx::array> gather(
    const mx::array& token, const DeviceRows& rows, int64_t segment, int64_t tokens,
    const Layer& layer, int64_t kv_heads, int64_t head_dim, const DeviceMemory& substrate);

// The first `tokens` rows of a region, without a copy. Valid while they stay mapped; keeps the
// substrate alive. Throws std::invalid_argument on a paged one, and std::logic_error where the
// range's newest step has one row of it and has not completed: gather() alone is ordered behind it.
mx::array region_view(
    const mx::array& token, const std::shared_ptr<AddressRange>& range, int64_t region,
    int64_t tokens, int64_t kv_heads, int64_t head_dim, mx::Dtype type,
    const DeviceMemory& substrate);

// As gated_delta() on a CPU (ops/gated_delta.h), of one type, with heads of 128 dimensions; the
// tails in the cells are of that type, too. Computed in float32, and what comes out is rounded
// once.
std::pair<mx::array, mx::array> gated_delta(
    const mx::array& token, const mx::array& qkv, const mx::array& z, const mx::array& a,
    const mx::array& b, const Delta& delta, const DeviceStateRows& states, int64_t offset,
    const DeviceMemory& substrate);

// silu(gate) * up, element by element: computed in float32, rounded once. Of one shape and type.
mx::array swiglu(const mx::array& gate, const mx::array& up);

// [1] uint64, the rows' epoch, which is signalled when everything that the arrays need has run.
mx::array step_end(
    const std::vector<mx::array>& arrays, const DeviceRows& rows, const DeviceMemory& substrate);

// Queues the copy on the mapper's thread; returns its ticket.
uint64_t copy_block(
    const DeviceMemory& substrate, const std::shared_ptr<Mapper>& mapper,
    const std::shared_ptr<AddressRange>& source, int64_t source_block,
    const std::shared_ptr<AddressRange>& target, int64_t target_block, int64_t tokens,
    const std::shared_ptr<CopyCounter>& counter);

}  // namespace quire::ops::device
