#include "core/metal/shared_event.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace quire::metal {

NS::SharedPtr<MTL::SharedEvent> make_shared_event(MTL::Device* device) {
  auto event = NS::TransferPtr(device->newSharedEvent());
  if (!event) {
    throw std::system_error(ENOMEM, std::generic_category(), "the GPU gives no shared event");
  }
  return event;
}

bool wait_for_value(
    MTL::SharedEvent* event, uint64_t value, std::chrono::nanoseconds timeout) {
  const auto limit = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  // What it says counts, not what the wait says: a wait that ends early has ended for some reason
  // of the system's.
  event->waitUntilSignaledValue(value, static_cast<uint64_t>(std::max<int64_t>(limit, 0)));
  return event->signaledValue() >= value;
}

}  // namespace quire::metal
