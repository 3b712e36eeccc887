#include "core/metal/context.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace quire::metal {
namespace {

Capabilities require_all(MTL::Device* device, Kind kind) {
  Capabilities found = Capabilities::probe(device);
  std::string list;
  for (const std::string& what : found.missing_for(kind)) {
    list += (list.empty() ? "" : "; ") + what;
  }
  if (!list.empty()) {
    throw std::runtime_error(
        "the GPU " + found.name + " cannot run the " + name_of(kind) + " backend: " + list);
  }
  return found;
}

}  // namespace

Context::Context(
    NS::SharedPtr<MTL::Device> device_, Kind kind_, const Geometry& geometry_,
    std::chrono::nanoseconds timeout)
    : device(std::move(device_)),
      capabilities(require_all(device.get(), kind_)),
      kind(kind_),
      geometry(geometry_),
      health(timeout),
      epochs(device.get()),
      residency(device.get(), capabilities.residency_sets) {
  if (kind == Kind::sparse) {
    mapping = std::make_unique<MappingQueue>(device.get(), health);
    work = std::make_unique<BlockWork>(device.get(), health);
    residency.attach(mapping->queue());
    residency.attach(work->queue());
  }
}

void Context::require_running() const {
  if (ended) {
    throw std::logic_error("the substrate has been shut down");
  }
}

}  // namespace quire::metal
