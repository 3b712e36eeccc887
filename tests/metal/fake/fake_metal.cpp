#include "fake_metal.h"

#include "commands.h"
#include "device.h"

namespace quire::fake {

NS::SharedPtr<MTL::Device> new_device() {
  return NS::TransferPtr(reinterpret_cast<MTL::Device*>(new Device()));
}

void encode(
    MTL::CommandBuffer* commands, const std::string& what, std::vector<Access> accesses,
    std::function<void()> body, const std::vector<MTL::Resource*>& used) {
  auto* const into = reinterpret_cast<CommandBuffer*>(commands);
  std::set<const Allocation*> bound;
  for (MTL::Resource* resource : used) {
    auto* const buffer = reinterpret_cast<Buffer*>(resource);
    into->use(buffer);
    bound.insert(buffer);
  }
  into->encode(what, std::move(accesses), std::move(body), std::move(bound));
}

}  // namespace quire::fake
