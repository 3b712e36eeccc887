#include "ops/checks.h"

#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

namespace quire::ops {
namespace {

constexpr int64_t kMaxTokens = INT32_MAX;  // what a dimension of an MLX array can hold

size_t checked_block(const char* name, const AddressRange& range, int64_t block) {
  checked_run(name, block, 1, range.mapped_tokens() / range.geometry().tokens_per_block());
  return static_cast<size_t>(block);
}

}  // namespace

void check_rows_shape(const char* name, const mx::array& x) {
  if (x.ndim() != 3) {
    throw std::invalid_argument(
        std::string(name) + " has " + std::to_string(x.ndim()) +
        " dimensions; it must be [rows, heads, head_dim]");
  }
}

void check_row_count(const char* name, const mx::array& x, const RowTable& rows) {
  if (static_cast<size_t>(x.shape(0)) != rows.rows().size()) {
    throw std::invalid_argument(
        std::string(name) + " has " + std::to_string(x.shape(0)) + " rows; the row table has " +
        std::to_string(rows.rows().size()));
  }
}

void check_same_shape(const mx::array& keys, const mx::array& values) {
  if (keys.shape() != values.shape()) {
    throw std::invalid_argument("keys and values have different shapes");
  }
}

void check_projected(
    const mx::array& queries, const mx::array& keys, const mx::array& values,
    const RowTable& rows) {
  check_same_shape(keys, values);
  check_row_count("queries", queries, rows);
  check_row_count("keys", keys, rows);
  if (queries.shape(2) != keys.shape(2)) {
    throw std::invalid_argument("queries and keys have a different head_dim");
  }
}

void check_heads(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads) {
  const auto last = static_cast<int64_t>(geometry.regions()) - 1;
  checked_between("key_region", layer.key_region, 0, last);
  checked_between("value_region", layer.value_region, 0, last);
  checked_between("query_heads", query_heads, 1, cpu::kMaxQueryHeads);
  checked_between("kv_heads", kv_heads, 1, query_heads);
  if (query_heads % kv_heads != 0) {
    throw std::invalid_argument(
        std::to_string(query_heads) + " query heads cannot share " + std::to_string(kv_heads) +
        " KV heads evenly");
  }
}

void check_row_bytes(const Geometry& geometry, const Layer& layer, size_t row_bytes) {
  for (int64_t region : {layer.key_region, layer.value_region}) {
    const size_t row = geometry.row_bytes(static_cast<size_t>(region));
    if (row != row_bytes) {
      throw std::invalid_argument(
          "region " + std::to_string(region) + " has rows of " + std::to_string(row) +
          " bytes; these heads need " + std::to_string(row_bytes));
    }
  }
}

void check_view(
    const AddressRange& range, int64_t region, int64_t tokens, int64_t kv_heads, int64_t head_dim,
    mx::Dtype type) {
  const Geometry& geometry = range.geometry();
  checked_between("region", region, 0, static_cast<int64_t>(geometry.regions()) - 1);
  checked_between("tokens", tokens, 1, kMaxTokens);
  checked_run("mapped tokens", 0, tokens, range.mapped_tokens());
  const auto row = static_cast<int64_t>(geometry.row_bytes(static_cast<size_t>(region)));
  checked_between("kv_heads", kv_heads, 1, row);
  checked_between("head_dim", head_dim, 1, row);
  if (kv_heads * head_dim * static_cast<int64_t>(mx::size_of(type)) != row) {
    throw std::invalid_argument(
        "region " + std::to_string(region) + " has rows of " + std::to_string(row) +
        " bytes; that shape and type do not fill them");
  }
}

size_t check_block_copy(
    const AddressRange& source, int64_t source_block, const AddressRange& target,
    int64_t target_block, int64_t tokens) {
  const Geometry& geometry = source.geometry();
  if (!(geometry == target.geometry())) {
    throw std::invalid_argument("the source and the target have different geometries");
  }
  const size_t most = geometry.tokens_per_block();
  const size_t count = checked_between("tokens", tokens, 1, static_cast<int64_t>(most));
  checked_block("mapped source blocks", source, source_block);
  const size_t to = checked_block("mapped target blocks", target, target_block);
  if (target.first_read_only(to * most, count)) {
    throw std::out_of_range("target block " + std::to_string(to) + " is read-only");
  }
  return count * geometry.block_bytes() / most;
}

}  // namespace quire::ops
