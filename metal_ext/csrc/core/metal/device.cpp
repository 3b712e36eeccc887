#include "core/metal/device.h"

#include <system_error>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace quire::metal {

void Health::fail(const std::string& what) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) {
      failure_ = what;
    }
  }
  throw std::runtime_error(what);
}

void Health::time_out(const std::string& what) {
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(timeout_);
  fail(
      "the GPU did not finish within " + std::to_string(limit.count()) + " ms: " + what +
      "; quire must end, and start again with the paged or the dense backend");
}

void Health::require() const {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) {
    throw std::runtime_error(failure_);
  }
}

std::string Health::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

NS::SharedPtr<NS::AutoreleasePool> new_pool() {
  return NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
}

void refuse_memory(const std::string& object) {
  throw std::system_error(ENOMEM, std::generic_category(), object);
}

NS::SharedPtr<MTL::Buffer> make_shared_buffer(MTL::Device* device, size_t bytes) {
  const auto pool = new_pool();
  auto buffer = NS::TransferPtr(device->newBuffer(
      bytes, MTL::ResourceStorageModeShared | MTL::ResourceHazardTrackingModeUntracked));
  if (!buffer) {
    refuse_memory("a GPU buffer of " + std::to_string(bytes) + " bytes");
  }
  return buffer;
}

NS::SharedPtr<MTL::SharedEvent> make_shared_event(MTL::Device* device) {
  auto event = NS::TransferPtr(device->newSharedEvent());
  if (!event) {
    refuse_memory("the GPU gives no shared event");
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
