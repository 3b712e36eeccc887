#include "core/metal/context.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "core/checked.h"
#include "core/metal/sparse.h"

// Implements what heaps and ranges share: the check of the device, and pauses between steps.
namespace quire::metal {
namespace {

Capabilities require_all(MTL::Device* device, Kind kind) {
  Capabilities found = Capabilities::probe(device);
  std::string list;
  for (const std::string& what : found.missing_for(kind)) {
    list += (list.empty() ? "" : "; ") + what;
  }
  require<std::runtime_error>(list.empty(), "the GPU ", found.name, " cannot run the ",
                              name_of(kind), " backend: ", list);
  return found;
}

Residency::Options of_device(Residency::Options options, const Capabilities& capabilities) {
  options.supported = capabilities.residency_sets;
  options.working_set_bytes = capabilities.recommended_working_set_bytes;
  return options;
}

}  // namespace

Context::Context(
    NS::SharedPtr<MTL::Device> device_, Kind kind_, const Geometry& geometry_,
    bool maps_beside_steps_, std::chrono::nanoseconds timeout,
    Residency::Options residency_options)
    : device(std::move(device_)),
      capabilities(require_all(device.get(), kind_)),
      kind(kind_),
      geometry(geometry_),
      maps_beside_steps(kind != Kind::sparse || maps_beside_steps_),
      health(timeout),
      epochs(device.get()),
      residency(device.get(), health, of_device(std::move(residency_options), capabilities)) {
  if (kind == Kind::sparse) {
    mapping = std::make_unique<MappingQueue>(device.get(), health);
    work = std::make_unique<BlockWork>(device.get(), health);
    bundle = std::make_unique<Bundle>(*this);
    staging = std::make_unique<Staging>(*this);
    residency.attach_own({mapping->queue(), work->queue(), staging->queue()});
  }
}

Context::~Context() = default;

void Context::settle() {
  const auto turn = turns.change();
  const auto gather = [this] { residency.gather(); };
  if (residency.crowded() && !epochs.while_idle(health.timeout(), gather)) {
    refuse_memory("a residency set: there was always a step in flight");
  }
  residency.settle();
}

Epochs::Pause Context::mapping_point(const char* what) {
  return maps_beside_steps ? Epochs::Pause() : epochs.pause(what);
}

void Context::require_running() const {
  require<std::logic_error>(!ended, "the backend has been shut down");
}

void Context::wait_for(uint64_t epoch, const char* what) {
  if (!epochs.wait(epoch, health.timeout())) {
    health.time_out(message("epoch ", epoch, ", before ", what));
  }
}

DeviceHeap& Context::own(Heap& heap) const {
  auto* const device_heap = dynamic_cast<DeviceHeap*>(&heap);
  require<std::invalid_argument>(
      device_heap != nullptr && device_heap->context().get() == this,
      "the heap is not of this backend");
  return *device_heap;
}

}  // namespace quire::metal
