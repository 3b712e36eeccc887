#include "device.h"

#include <algorithm>

#include "commands.h"
#include "events.h"
#include "foundation.h"
#include "library.h"
#include "mapping.h"
#include "residency_set.h"

namespace quire::fake {
namespace {

constexpr uint64_t kPrivate = 2;
constexpr int64_t kPlacement = 1;

const auto defined = [] {
  define("MTLDevice")
      .method<&Device::device_name>("name")
      .method<&Device::max_buffer_bytes>("maxBufferLength")
      .method<&Device::working_set_bytes>("recommendedMaxWorkingSetSize")
      .method<&Device::unified_memory>("hasUnifiedMemory")
      .method<&Device::placement_sparse>("supportsPlacementSparse")
      .method<&Device::supports_family>("supportsFamily:")
      .method<&Device::new_buffer>("newBufferWithLength:options:")
      .method<&Device::new_sparse_buffer>("newBufferWithLength:options:placementSparsePageSize:")
      .method<&Device::new_heap>("newHeapWithDescriptor:")
      .method<&Device::new_queue>("newCommandQueue")
      .method<&Device::new_mapping_queue>("newMTL4CommandQueue")
      .method<&Device::new_event>("newSharedEvent")
      .method<&Device::new_residency_set>("newResidencySetWithDescriptor:error:")
      .method<&Device::new_library>("newLibraryWithSource:options:error:")
      .method<&Device::new_pipeline>("newComputePipelineStateWithFunction:error:");
  return true;
}();

// Null, with an error in words, where tests want a refusal.
bool refused(const char* selector, Object** error = nullptr) {
  if (!Machine::current().refuses(selector)) {
    return false;
  }
  if (error != nullptr) {
    *error = (new Error("refused by the test"))->autorelease();
  }
  return true;
}

}  // namespace

Object* Device::device_name() const {
  return (new String(Machine::current().options().name))->autorelease();
}

bool Device::supports_family(int64_t family) const {
  const auto& families = Machine::current().options().families;
  return std::find(families.begin(), families.end(), family) != families.end();
}

Object* Device::new_buffer(uint64_t bytes, uint64_t options) {
  Machine& machine = Machine::current();
  const std::lock_guard lock(machine.mutex);
  if (bytes == 0 || bytes > max_buffer_bytes()) {
    report("a buffer of " + std::to_string(bytes) + " bytes was asked for");
    return nullptr;
  }
  if (refused("newBufferWithLength:options:") || !machine.charge(bytes)) {
    return nullptr;
  }
  return new Buffer(bytes, options);
}

Object* Device::new_sparse_buffer(uint64_t bytes, uint64_t options, int64_t page_size) {
  const std::lock_guard lock(Machine::current().mutex);
  const uint64_t page = page_bytes_of(page_size);
  if (page == 0) {
    report("a sparse buffer was asked for with the page size " + std::to_string(page_size));
    return nullptr;
  }
  if ((options >> 4 & 15) != kPrivate) {
    report("a placement sparse buffer must have private storage");
    return nullptr;
  }
  if (bytes == 0 || bytes % page != 0 || bytes > max_buffer_bytes()) {
    report("a sparse buffer of " + std::to_string(bytes) + " bytes was asked for");
    return nullptr;
  }
  return refused("newBufferWithLength:options:placementSparsePageSize:")
             ? nullptr
             : new Buffer(bytes, options, page);
}

Object* Device::new_heap(HeapDescriptor* descriptor) {
  Machine& machine = Machine::current();
  const std::lock_guard lock(machine.mutex);
  const uint64_t page = page_bytes_of(descriptor->page_size);
  if (descriptor->type != kPlacement || descriptor->storage_mode != kPrivate || page == 0 ||
      descriptor->size == 0 || descriptor->size % page != 0) {
    report("a heap for sparse buffers must be a private placement heap of whole pages");
    return nullptr;
  }
  if (refused("newHeapWithDescriptor:") || !machine.charge(descriptor->size)) {
    return nullptr;
  }
  return new Heap(*descriptor);
}

Object* Device::new_queue() {
  return refused("newCommandQueue") ? nullptr : new CommandQueue();
}

Object* Device::new_mapping_queue() {
  return refused("newMTL4CommandQueue") ? nullptr : new MappingQueue();
}

Object* Device::new_event() { return refused("newSharedEvent") ? nullptr : new Event(); }

Object* Device::new_residency_set(Object*, Object** error) {
  return refused("newResidencySetWithDescriptor:error:", error) ? nullptr : new ResidencySet();
}

Object* Device::new_library(Object* text, Object*, Object** error) {
  return refused("newLibraryWithSource:options:error:", error)
             ? nullptr
             : new Library(static_cast<const String*>(text)->text());
}

Object* Device::new_pipeline(Object* function, Object** error) {
  return refused("newComputePipelineStateWithFunction:error:", error)
             ? nullptr
             : new Pipeline(static_cast<const Function*>(function)->kernel());
}

}  // namespace quire::fake

// Apple's functions outside of any class.
extern "C" {

MTL::Device* MTLCreateSystemDefaultDevice() {
  return reinterpret_cast<MTL::Device*>(new quire::fake::Device());
}

NS::Array* MTLCopyAllDevices() {
  return reinterpret_cast<NS::Array*>(new quire::fake::Array({new quire::fake::Device()}));
}

// metal-cpp refers to these; nothing of ours calls them.
void* MTLCopyAllDevicesWithObserver() { return nullptr; }
void MTLRemoveDeviceObserver() {}

}  // extern "C"
