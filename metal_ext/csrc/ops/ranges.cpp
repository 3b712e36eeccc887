#include <cstring>
#include <stdexcept>
#include <vector>

#include "ops/checks.h"
#include "ops/primitive.h"

// Views of memory: of regions of K and V, and of weights. Copies of blocks of K and V.
namespace quire::ops {
namespace {

// MLX's CPU allocator stores a size field before each buffer's address, and so does a range
// (core/address_range.h). So MLX can view a range as a buffer.
constexpr size_t kSizeField = sizeof(size_t);

class RegionView final : public CpuPrimitive {
 public:
  RegionView(std::shared_ptr<AddressRange> range, size_t offset)
      : CpuPrimitive("region_view"), range_(std::move(range)), offset_(offset) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& out) override {
    mx::allocator::Data memory(
        mx::allocator::Buffer(range_->region(0) - kSizeField),
        [keep = range_](mx::allocator::Buffer) {});
    show(out[0], std::move(memory), offset_);
  }

 private:
  std::shared_ptr<AddressRange> range_;
  size_t offset_;
};

// Copies the K and V of a block's first `tokens` tokens to another block.
struct BlockCopy {
  static constexpr Results kResults = Results::token;
  std::shared_ptr<AddressRange> source;
  size_t source_block;
  std::shared_ptr<AddressRange> target;
  size_t target_block;
  size_t tokens;
  std::shared_ptr<CopyCounter> counter;

  void run(const Arrays&, const Arrays&) const {
    const Geometry& shape = source->geometry();
    for (size_t region = 0; region < shape.regions(); ++region) {
      const size_t block = shape.region_block_bytes(region);
      const size_t bytes = tokens * shape.row_bytes(region);
      std::memcpy(target->region(region) + target->slot(target_block) * block,
                  source->region(region) + source->slot(source_block) * block, bytes);
      counter->add(bytes);
    }
  }
};

}  // namespace

mx::array region_view(
    const mx::array& token, const std::shared_ptr<AddressRange>& range, int64_t region,
    int64_t tokens, int64_t kv_heads, int64_t head_dim, mx::Dtype type, int64_t first) {
  check_on_host(*range);
  const auto [shape, offset] =
      check_view(*range, region, first, tokens, kv_heads, head_dim, type);
  const size_t start = range->geometry().range_region_offset(static_cast<size_t>(region));
  return mx::array(shape, type, std::make_shared<RegionView>(range, start + offset), {token});
}

mx::array uncounted(const mx::array& array, bool transposable) {
  require<std::invalid_argument>(
      array.is_available(), "an array has an alias only when it is evaluated");
  // With a data_size of 1, arithmetic by element would take the alias for a scalar. Without the
  // flag `contiguous`, MLX goes by shape and strides. A transposed view keeps `row_contiguous`, so
  // an alias that may be transposed has it only if its elements are in order in both directions.
  const mx::array::Flags flags = array.flags();
  const bool in_order = flags.row_contiguous && (flags.col_contiguous || !transposable);
  mx::array alias(array.shape(), array.dtype(), nullptr, std::vector<mx::array>{});
  alias.copy_shared_buffer(
      array, array.strides(),
      {.contiguous = false, .row_contiguous = in_order, .col_contiguous = false},
      /*data_size=*/0);
  alias.set_status(mx::array::Status::available);
  return alias;
}

mx::array block_copy(
    const mx::array& token, const std::shared_ptr<AddressRange>& source, int64_t source_block,
    const std::shared_ptr<AddressRange>& target, int64_t target_block, int64_t tokens,
    const std::shared_ptr<CopyCounter>& counter) {
  check_on_host(*source);
  check_on_host(*target);
  check_block_copy(*source, source_block, *target, target_block, tokens);
  BlockCopy work{source, static_cast<size_t>(source_block),
                 target, static_cast<size_t>(target_block),
                 static_cast<size_t>(tokens), counter};
  return mx::array(
      token.shape(), token.dtype(), operation("block_copy", std::move(work)), {token});
}

}  // namespace quire::ops
