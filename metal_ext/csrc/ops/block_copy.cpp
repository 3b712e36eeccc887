#include <cstring>

#include "ops/kv_rows.h"
#include "ops/primitive.h"

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

}  // namespace

mx::array block_copy(
    const mx::array& token, const std::shared_ptr<AddressRange>& source, int64_t source_block,
    const std::shared_ptr<AddressRange>& target, int64_t target_block, int64_t tokens,
    const std::shared_ptr<CopyCounter>& counter) {
  check_on_host(*source);
  check_on_host(*target);
  check_block_copy(*source, source_block, *target, target_block, tokens);
  auto primitive = std::make_shared<BlockCopy>(
      BlockRows{source, static_cast<size_t>(source_block)},
      BlockRows{target, static_cast<size_t>(target_block)}, static_cast<size_t>(tokens), counter);
  return mx::array(token.shape(), token.dtype(), std::move(primitive), {token});
}

}  // namespace quire::ops
