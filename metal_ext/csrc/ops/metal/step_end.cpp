#include <stdexcept>
#include <string>

#include "core/metal/kernel_text.h"
#include "ops/checks.h"
#include "ops/metal/ops.h"
#include "ops/metal/primitive.h"

namespace quire::ops {
namespace {

// The command runs behind whatever wrote the arrays, and its encoder behind all encoders before it.
// It is there so that there is an encoder to wait: one without commands might be left out.
class StepEnd final : public RowsPrimitive {
 public:
  explicit StepEnd(DeviceRows rows) : RowsPrimitive("step_end", std::move(rows)) {}

 protected:
  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const uint64_t epoch = rows().epoch();
    out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
    encoder.kernel(metal::mark_step_kernel());
    for (const mx::array& array : in) {
      encoder.after(array);
    }
    encoder.output(out[0], 0);
    encoder.bytes(epoch, 1);
    encoder.run_groups(MTL::Size(1, 1, 1));
    encoder.signal(memory().epochs().event(), epoch);
    rows().end();
  }
};

}  // namespace

mx::array step_end(
    const std::vector<mx::array>& arrays, const DeviceRows& rows, const DeviceMemory& substrate) {
  if (arrays.empty()) {
    throw std::invalid_argument("step_end needs the arrays that the step computes");
  }
  check_rows_of("step_end", *rows, substrate);
  rows->close();
  std::vector<mx::array> inputs(arrays);
  inputs.push_back(rows->entries());
  if (substrate->newest_end) {
    inputs.push_back(*substrate->newest_end);
  }
  const mx::array end({1}, mx::uint64, std::make_shared<StepEnd>(rows), std::move(inputs));
  substrate->newest_end = end;
  substrate->newest_ended = rows->epoch();
  return end;
}

uint64_t copy_block(
    Mapper& mapper, const std::shared_ptr<AddressRange>& source, int64_t source_block,
    const std::shared_ptr<AddressRange>& target, int64_t target_block, int64_t tokens,
    const std::shared_ptr<CopyCounter>& counter, const DeviceMemory& substrate) {
  substrate->memory->require_own(*source);
  substrate->memory->require_own(*target);
  const size_t bytes =
      check_block_copy(*source, source_block, *target, target_block, tokens);
  return mapper.submit([=] {
    substrate->memory->copy_block(
        *source, static_cast<size_t>(source_block), *target, static_cast<size_t>(target_block),
        static_cast<size_t>(tokens));
    counter->add(bytes);
  });
}

}  // namespace quire::ops
