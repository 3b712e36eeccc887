#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/address_range.h"
#include "core/mapper.h"
#include "mlx/array.h"
#include "mlx/dtype.h"
#include "ops/gated_delta.h"
#include "ops/metal/mixture.h"
#include "ops/metal/rows.h"
#include "ops/metal/stored_matrix.h"
#include "ops/ops.h"

// MLX primitives over K and V in a GPU's memory. `token` is the ordering handle (ops/ops.h), which
// orders reads after writes. Arrays and layers are float32, float16 or bfloat16. head_dim is 64,
// 128 or 256. After step_end, operations over the rows throw std::logic_error. metal_ext/_ext.pyi
// documents the operations.
namespace quire::ops::device {

mx::array append(
    const mx::array& token, const mx::array& keys, const mx::array& values,
    const DeviceRows& rows, const Layer& layer, const DeviceMemory& kv_backend);

mx::array decode_attention(
    const mx::array& token, const mx::array& queries, const DeviceRows& rows, int64_t first_row,
    const Layer& layer, int64_t kv_heads, const Softmax& softmax,
    const DeviceMemory& kv_backend);

std::pair<mx::array, mx::array> project_append(
    const mx::array& token, const mx::array& queries, const mx::array& keys,
    const mx::array& values, const std::optional<QKNorms>& norms,
    const std::optional<Rope>& rope,
    const DeviceRows& rows, const Layer& layer, const DeviceMemory& kv_backend);

std::pair<mx::array, mx::array> gather(
    const mx::array& token, const DeviceRows& rows, int64_t segment, int64_t first, int64_t tokens,
    const Layer& layer, int64_t kv_heads, int64_t head_dim, const DeviceMemory& kv_backend);

// Returns a view of a region's rows [first, tokens), valid while they are mapped. Throws
// std::invalid_argument if memory is paged. Throws std::logic_error if a step with a single row of
// this range still runs; gather() copies such rows in order.
mx::array region_view(
    const mx::array& token, const std::shared_ptr<AddressRange>& range, int64_t region,
    int64_t tokens, int64_t kv_heads, int64_t head_dim, mx::Dtype type,
    const DeviceMemory& kv_backend, int64_t first);

std::pair<mx::array, mx::array> gated_delta(
    const mx::array& token, const mx::array& qkv, const mx::array& z, const mx::array& a,
    const mx::array& b, const Delta& delta, const DeviceStateRows& states, int64_t offset,
    const DeviceMemory& kv_backend);

std::vector<mx::array> multiply(
    const mx::array& x, const std::vector<Stored>& matrices,
    const std::optional<mx::array>& residual);

mx::array multiply_gated(
    const mx::array& x, const Stored& gate, const Stored& up, const std::string& kind);

mx::array mixture(
    const mx::array& x, const mx::array& residual, const mx::array& logits,
    const std::shared_ptr<Mixture>& mixture, const std::optional<mx::array>& shared_gate);

mx::array step_end(
    const std::vector<mx::array>& arrays, const DeviceRows& rows, const DeviceMemory& kv_backend);

uint64_t copy_block(
    const DeviceMemory& kv_backend, const std::shared_ptr<Mapper>& mapper,
    const std::shared_ptr<AddressRange>& source, int64_t source_block,
    const std::shared_ptr<AddressRange>& target, int64_t target_block, int64_t tokens,
    const std::shared_ptr<CopyCounter>& counter);

}  // namespace quire::ops::device
