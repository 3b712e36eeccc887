#include "ops/checks.h"

#include <stdexcept>
#include <string>

// Implements the argument checks of operations over K and V.
namespace quire::ops {
namespace {

constexpr int64_t kMaxTokens = INT32_MAX;  // the largest dimension of an MLX array

size_t checked_block(const char* name, const AddressRange& range, int64_t block) {
  const auto tokens = static_cast<int64_t>(range.geometry().tokens_per_block());
  checked_between(name, block, 0, static_cast<int64_t>(range.geometry().blocks_per_range()) - 1);
  checked_run(name, block, 1, range.mapped_run(static_cast<size_t>(block * tokens)).end / tokens);
  return static_cast<size_t>(block);
}

}  // namespace

void check_rows_shape(const char* name, const mx::array& x) {
  require<std::invalid_argument>(
      x.ndim() == 3, name, " has ", x.ndim(), " dimensions; it must be [rows, heads, head_dim]");
}

void check_row_count(const char* name, const mx::array& x, const RowTable& rows) {
  require<std::invalid_argument>(
      static_cast<size_t>(x.shape(0)) == rows.rows().size(), name, " has ", x.shape(0),
      " rows; the row table has ", rows.rows().size());
}

void check_same_shape(const mx::array& keys, const mx::array& values) {
  require<std::invalid_argument>(
      keys.shape() == values.shape(), "keys and values have different shapes");
}

void check_projected(
    const mx::array& queries, const mx::array& keys, const mx::array& values,
    const RowTable& rows) {
  check_same_shape(keys, values);
  check_row_count("queries", queries, rows);
  check_row_count("keys", keys, rows);
  require<std::invalid_argument>(
      queries.shape(2) == keys.shape(2), "queries and keys have a different head_dim");
}

void check_heads(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads) {
  const auto last = static_cast<int64_t>(geometry.regions()) - 1;
  checked_between("key_region", layer.key_region, 0, last);
  checked_between("value_region", layer.value_region, 0, last);
  checked_between("query_heads", query_heads, 1, cpu::kMaxQueryHeads);
  checked_between("kv_heads", kv_heads, 1, query_heads);
  require<std::invalid_argument>(query_heads % kv_heads == 0, query_heads,
                                 " query heads cannot share ", kv_heads, " KV heads evenly");
}

void check_row_bytes(const Geometry& geometry, const Layer& layer, size_t row_bytes) {
  for (int64_t region : {layer.key_region, layer.value_region}) {
    const size_t row = geometry.row_bytes(static_cast<size_t>(region));
    require<std::invalid_argument>(row == row_bytes, "region ", region, " has rows of ", row,
                                   " bytes; these heads need ", row_bytes);
  }
}

std::pair<mx::Shape, size_t> check_view(
    const AddressRange& range, int64_t region, int64_t first, int64_t tokens, int64_t kv_heads,
    int64_t head_dim, mx::Dtype type) {
  const Geometry& geometry = range.geometry();
  checked_between("region", region, 0, static_cast<int64_t>(geometry.regions()) - 1);
  checked_between("tokens", tokens, 1, kMaxTokens);
  const auto mapped = range.mapped_run(static_cast<size_t>(tokens - 1));
  checked_run("mapped tokens", first, tokens - first, mapped.end);
  require<std::out_of_range>(
      static_cast<size_t>(first) >= mapped.first, "the first token is ", first, "; those before ",
      mapped.first, " are unmapped");
  const auto row = static_cast<int64_t>(geometry.row_bytes(static_cast<size_t>(region)));
  checked_between("kv_heads", kv_heads, 1, row);
  checked_between("head_dim", head_dim, 1, row);
  require<std::invalid_argument>(
      kv_heads * head_dim * static_cast<int64_t>(mx::size_of(type)) == row, "region ", region,
      " has rows of ", row, " bytes; that shape and type do not fill them");
  return {{narrowed<int>("tokens", tokens - first), narrowed<int>("kv_heads", kv_heads),
           narrowed<int>("head_dim", head_dim)},
          static_cast<size_t>((first + mapped.shift) * row)};
}

void show(mx::array& view, mx::allocator::Data memory, size_t offset) {
  mx::Strides strides(view.strides());
  const mx::array::Flags flags{
      .contiguous = true, .row_contiguous = true, .col_contiguous = view.size() <= 1};
  view.set_data(std::move(memory), view.size(), std::move(strides), flags,
                narrowed<int64_t>("offset", offset));
}

size_t check_block_copy(
    const AddressRange& source, int64_t source_block, const AddressRange& target,
    int64_t target_block, int64_t tokens) {
  const Geometry& geometry = source.geometry();
  require<std::invalid_argument>(
      geometry == target.geometry(), "the source and the target have different geometries");
  const size_t most = geometry.tokens_per_block();
  const size_t count = checked_between("tokens", tokens, 1, static_cast<int64_t>(most));
  checked_block("mapped source blocks", source, source_block);
  const size_t to = checked_block("mapped target blocks", target, target_block);
  require<std::out_of_range>(
      !target.first_read_only(to * most, count), "target block ", to, " is read-only");
  return count * geometry.block_bytes() / most;
}

void check_float32(const char* name, const mx::array& x, const mx::Shape& shape) {
  if (x.shape() != shape || x.dtype() != mx::float32) {
    std::string sizes;
    for (const int size : shape) {
      sizes.append(sizes.empty() ? "" : ", ").append(std::to_string(size));
    }
    throw std::invalid_argument(message(name, " must be [", sizes, "] float32"));
  }
}

void check_norms(const std::optional<QKNorms>& norms, int head_dim) {
  if (norms) {
    check_float32("q_weight", norms->query_weight, {head_dim});
    check_float32("k_weight", norms->key_weight, {head_dim});
  }
}

void check_on_host(const AddressRange& range) {
  require<std::invalid_argument>(
      dynamic_cast<const HostRange*>(&range) != nullptr,
      "the range's memory is a device's: rows of it are made by its MetalKVBackend");
}

void check_rows_array(const char* name, const mx::array& x) {
  check_rows_shape(name, x);
  require<std::invalid_argument>(x.dtype() == mx::float32 || x.dtype() == mx::bfloat16, name,
                                 " must be float32 or bfloat16 on the CPU");
}

cpu::HeadShape check_layer(
    const Geometry& geometry, const Layer& layer, int64_t query_heads, int64_t kv_heads,
    int64_t head_dim) {
  check_heads(geometry, layer, query_heads, kv_heads);
  require<std::invalid_argument>(
      cpu::supports_head_dim(static_cast<size_t>(head_dim)), "head_dim is ", head_dim,
      "; the CPU kernels are built for 32, 64, 128 and 256");
  require<std::invalid_argument>(
      layer.type == mx::bfloat16 || layer.type == mx::float32,
      "the CPU backend keeps K and V as bfloat16 or float32");
  const cpu::HeadShape shape{
      static_cast<size_t>(query_heads), static_cast<size_t>(kv_heads),
      static_cast<size_t>(head_dim),
      layer.type == mx::bfloat16 ? cpu::KVType::bfloat16 : cpu::KVType::float32};
  check_row_bytes(geometry, layer, shape.row_bytes());
  return shape;
}

}  // namespace quire::ops
