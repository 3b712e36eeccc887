#include "ops/kv_rows.h"
#include "ops/primitive.h"

namespace quire::ops {
namespace {

// MLX's CPU allocator hands out addresses eight bytes above its own size field; the range keeps
// its size there (address_range.h), so that its start can pass for such a buffer.
constexpr size_t kSizeField = sizeof(size_t);

class RegionView final : public CachePrimitive {
 public:
  RegionView(std::shared_ptr<AddressRange> range, size_t region)
      : CachePrimitive("region_view"), range_(std::move(range)), region_(region) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& out) override {
    mx::array& view = out[0];
    mx::Strides strides(view.strides());
    const mx::array::Flags flags{
        .contiguous = true, .row_contiguous = true, .col_contiguous = view.size() <= 1};
    view.set_data(
        mx::allocator::Data(
            mx::allocator::Buffer(range_->region(0) - kSizeField),
            [keep = range_](mx::allocator::Buffer) {}),
        view.size(), std::move(strides), flags,
        static_cast<int64_t>(range_->geometry().range_region_offset(region_)));
  }

 private:
  std::shared_ptr<AddressRange> range_;
  size_t region_;
};

}  // namespace

mx::array region_view(
    const mx::array& token, const std::shared_ptr<AddressRange>& range, int64_t region,
    int64_t tokens, int64_t kv_heads, int64_t head_dim, mx::Dtype type) {
  check_on_host(*range);
  check_view(*range, region, tokens, kv_heads, head_dim, type);
  const mx::Shape shape{
      narrowed<int>("tokens", tokens), narrowed<int>("kv_heads", kv_heads),
      narrowed<int>("head_dim", head_dim)};
  return mx::array(
      shape, type, std::make_shared<RegionView>(range, static_cast<size_t>(region)), {token});
}

}  // namespace quire::ops
