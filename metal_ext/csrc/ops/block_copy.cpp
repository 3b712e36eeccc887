#include "core/checked.h"
#include "ops/ops.h"
#include "ops/primitive.h"

#include <cstring>

namespace quire::ops {
namespace {

// The first `tokens` rows of a block.
struct BlockRows {
  std::shared_ptr<AddressRange> range;
  size_t block;
};

class BlockCopy final : public CachePrimitive {
 public:
  BlockCopy(
      BlockRows source, BlockRows target, size_t tokens, std::shared_ptr<CopyCounter> counter)
      : CachePrimitive("block_copy"),
        source_(std::move(source)),
        target_(std::move(target)),
        tokens_(tokens),
        counter_(std::move(counter)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].copy_shared_buffer(in[0]);
    enqueue([source = source_, target = target_, tokens = tokens_, counter = counter_] {
      const Geometry& shape = source.range->geometry();
      for (size_t region = 0; region < shape.regions(); ++region) {
        const size_t block = shape.region_block_bytes(region);
        const size_t bytes = tokens * shape.row_bytes(region);
        std::memcpy(
            target.range->region(region) + target.block * block,
            source.range->region(region) + source.block * block, bytes);
        counter->add(bytes);
      }
    });
  }

 private:
  BlockRows source_;
  BlockRows target_;
  size_t tokens_;
  std::shared_ptr<CopyCounter> counter_;
};

BlockRows checked_block(
    const char* name, const std::shared_ptr<AddressRange>& range, int64_t block) {
  checked_run(name, block, 1, range->mapped_tokens() / range->geometry().tokens_per_block());
  return {range, static_cast<size_t>(block)};
}

}  // namespace

mx::array block_copy(
    const mx::array& token, const std::shared_ptr<AddressRange>& source, int64_t source_block,
    const std::shared_ptr<AddressRange>& target, int64_t target_block, int64_t tokens,
    const std::shared_ptr<CopyCounter>& counter) {
  if (!(source->geometry() == target->geometry())) {
    throw std::invalid_argument("the source and the target have different geometries");
  }
  const auto most = static_cast<int64_t>(source->geometry().tokens_per_block());
  const size_t count = checked_between("tokens", tokens, 1, most);
  const BlockRows from = checked_block("mapped source blocks", source, source_block);
  const BlockRows to = checked_block("mapped target blocks", target, target_block);
  if (target->first_read_only(to.block * source->geometry().tokens_per_block(), count)) {
    throw std::out_of_range("target block " + std::to_string(to.block) + " is read-only");
  }
  auto primitive = std::make_shared<BlockCopy>(from, to, count, counter);
  return mx::array(token.shape(), token.dtype(), std::move(primitive), {token});
}

}  // namespace quire::ops
