#pragma once

#include <utility>

#include "ops/ops.h"

namespace quire::ops {

// A layer's norms of queries and keys over head_dim.
struct HeadNorms {
  mx::array query_weight;  // [head_dim] float32
  mx::array key_weight;    // same
  double eps;
};

// The angles of the table's rows: [T, head_dim] float32, the cosines of head_dim / 2 dimensions and
// then their sines. That of dimension i is position * scale * base^(-2 i / head_dim).
mx::array rope_angles(
    const Rows& rows, int64_t head_dim, double base, double scale, const Workers& workers);

// RMS norm and RoPE (halves) of queries and keys, and append() of keys and values.
// joined: [T, (query_heads + 2 kv_heads) * head_dim] float32, queries, keys, values. Returns the
// next token, and the queries [T, query_heads, head_dim].
std::pair<mx::array, mx::array> project_append(
    const mx::array& token, const mx::array& joined, const HeadNorms& norms,
    const mx::array& angles, const Rows& rows, const Layer& layer, int64_t query_heads,
    int64_t kv_heads, const Workers& workers);

}  // namespace quire::ops
