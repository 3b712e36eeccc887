#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "ops/ops.h"
#include "ops/rope.h"

namespace quire::ops {

// The angles of the table's rows: [T, 2 * frequencies] float32, all cosines and then all sines,
// both times the magnitude.
mx::array rope_angles(
    const Rows& rows, const std::shared_ptr<const RopeTable>& rope, const Workers& workers);

// RMS norm and RoPE (halves) of queries and keys, each where it is given, and append() of keys and
// values. queries: [T, query_heads, head_dim], keys, values: [T, kv_heads, head_dim], float32 or
// bfloat16 of any strides; angles: [T, 2 * pairs] float32, of the first dimensions. Returns the
// next token, and the queries, of their own type.
std::pair<mx::array, mx::array> project_append(
    const mx::array& token, const mx::array& queries, const mx::array& keys,
    const mx::array& values, const std::optional<QKNorms>& norms,
    const std::optional<mx::array>& angles, const Rows& rows, const Layer& layer,
    const Workers& workers);

}  // namespace quire::ops
