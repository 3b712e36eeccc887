#include "core/metal/gpu.h"

#include <algorithm>
#include <cerrno>
#include <initializer_list>
#include <stdexcept>
#include <system_error>

#include "core/checked.h"

// Implements the test of a GPU's abilities, the record of its failures, and its objects.
namespace quire::metal {

namespace {

// Uses metal-cpp's protected functions to find out which methods an Objective-C object has.
struct Ask : NS::Object {
  static bool answers(const void* object, const char* selector) {
    return respondsToSelector(object, sel_registerName(selector));
  }
  static bool yes(const void* object, const char* selector) {
    return sendMessage<bool>(object, sel_registerName(selector));
  }
};

struct Family {
  MTL::GPUFamily value;
  const char* name;
};
constexpr Family kFamilies[] = {
    {MTL::GPUFamilyApple5, "apple5"},   {MTL::GPUFamilyApple6, "apple6"},
    {MTL::GPUFamilyApple7, "apple7"},   {MTL::GPUFamilyApple8, "apple8"},
    {MTL::GPUFamilyApple9, "apple9"},   {MTL::GPUFamilyApple10, "apple10"},
    {MTL::GPUFamilyMac2, "mac2"},       {MTL::GPUFamilyMetal3, "metal3"},
    {MTL::GPUFamilyMetal4, "metal4"},
};

constexpr auto kAll = {Kind::sparse, Kind::paged, Kind::dense};
constexpr auto kAddressed = {Kind::sparse, Kind::paged};
constexpr auto kSparse = {Kind::sparse};

// Demands each message (method name) that quire sends. A message that makes an object stands before
// the messages to that object.
class Probe {
 public:
  explicit Probe(MTL::Device* device) : device_(device) {}

  Capabilities run() {
    const auto pool = new_pool();
    describe();
    demand(kAll, device_, "the device",
           {"newBufferWithLength:options:", "newSharedEvent", "maxBufferLength"});
    demand(kSparse, device_, "the device",
           {"newBufferWithLength:options:placementSparsePageSize:", "newHeapWithDescriptor:",
            "newMTL4CommandQueue", "newCommandQueue", "newResidencySetWithDescriptor:error:",
            "newLibraryWithSource:options:error:", "newComputePipelineStateWithFunction:error:"});
    buffers_and_events();
    residency();
    queues();
    const auto descriptor = NS::TransferPtr(MTL::HeapDescriptor::alloc()->init());
    demand(kSparse, descriptor.get(), "a heap descriptor",
           {"setType:", "setStorageMode:", "setHazardTrackingMode:", "setSize:",
            "setMaxCompatiblePlacementSparsePageSize:"});
    if (found_.placement_sparse == false) {
      lacks(Kind::sparse, "the device says that it has no placement sparse resources");
    }
    return found_;
  }

 private:
  void lacks(Kind kind, const std::string& what) { found_.missing.push_back({kind, what}); }

  // Records every method in `selectors` that the object lacks, once per kind of memory in `kinds`.
  void demand(
      std::initializer_list<Kind> kinds, const void* object, const char* whose,
      std::initializer_list<const char*> selectors) {
    for (const Kind kind : kinds) {
      for (const char* selector : selectors) {
        if (object != nullptr && !Ask::answers(object, selector)) {
          lacks(kind, message(whose, " does not answer ", selector));
        }
      }
    }
  }

  // Returns true if the device has this method. If not, demand() has already recorded that.
  bool makes(const char* selector) const { return Ask::answers(device_, selector); }

  void describe() {
    if (const NS::String* name = device_->name()) {
      found_.name = name->utf8String();
    }
    for (const Family& family : kFamilies) {
      if (device_->supportsFamily(family.value)) {
        found_.families.push_back(family.name);
      }
    }
    if (makes("maxBufferLength")) {
      found_.max_buffer_bytes = device_->maxBufferLength();
    }
    if (makes("recommendedMaxWorkingSetSize")) {
      found_.recommended_working_set_bytes = device_->recommendedMaxWorkingSetSize();
    }
    found_.unified_memory = makes("hasUnifiedMemory") && device_->hasUnifiedMemory();
    if (makes("supportsPlacementSparse")) {
      found_.placement_sparse = Ask::yes(device_, "supportsPlacementSparse");
    }
    if (!found_.unified_memory) {
      lacks(Kind::paged, "the device's memory is not the processor's");
      lacks(Kind::dense, "the device's memory is not the processor's");
    }
  }

  void buffers_and_events() {
    if (makes("newBufferWithLength:options:")) {
      const auto buffer =
          NS::TransferPtr(device_->newBuffer(16, MTL::ResourceStorageModeShared));
      demand(kAll, buffer.get(), "a buffer", {"contents", "length"});
      demand(kAddressed, buffer.get(), "a buffer", {"gpuAddress"});
    }
    if (makes("newSharedEvent")) {
      const auto event = NS::TransferPtr(device_->newSharedEvent());
      demand(kAll, event.get(), "a shared event",
             {"signaledValue", "waitUntilSignaledValue:timeoutMS:"});
    }
  }

  void residency() {
    if (!makes("newResidencySetWithDescriptor:error:")) {
      return;
    }
    const auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
    NS::Error* error = nullptr;
    const auto set = NS::TransferPtr(device_->newResidencySet(descriptor.get(), &error));
    if (!set) {
      lacks(Kind::sparse, "the device makes no residency set");
      return;
    }
    const size_t before = found_.missing.size();
    demand(kSparse, set.get(), "a residency set",
           {"addAllocation:", "removeAllAllocations", "commit", "requestResidency",
            "endResidency"});
    found_.residency_sets = found_.missing.size() == before;
  }

  void queues() {
    if (makes("newCommandQueue")) {
      const auto queue = NS::TransferPtr(device_->newCommandQueue());
      demand(kSparse, queue.get(), "a command queue", {"commandBuffer"});
      const size_t before = found_.missing.size();
      demand(kSparse, queue.get(), "a command queue", {"addResidencySet:", "removeResidencySet:"});
      found_.residency_sets &= queue && found_.missing.size() == before;
    }
    if (makes("newMTL4CommandQueue")) {
      const auto queue = NS::TransferPtr(device_->newMTL4CommandQueue());
      if (!queue) {
        lacks(Kind::sparse, "the device makes no Metal 4 command queue");
      }
      demand(kSparse, queue.get(), "a Metal 4 command queue",
             {"updateBufferMappings:heap:operations:count:", "signalEvent:value:",
              "addResidencySet:", "removeResidencySet:"});
    }
  }

  MTL::Device* const device_;
  Capabilities found_;
};

}  // namespace

Kind kind_named(const std::string& name) {
  for (const Kind kind : kAll) {
    if (name == name_of(kind)) {
      return kind;
    }
  }
  throw std::invalid_argument(
      "the kind of a backend is \"" + name + "\"; it must be sparse, paged or dense");
}

Capabilities Capabilities::probe(MTL::Device* device) {
  return Probe(device).run();
}

std::vector<std::string> Capabilities::missing_for(Kind kind) const {
  std::vector<std::string> words;
  for (const Missing& one : missing) {
    if (one.needed_by == kind) {
      words.push_back(one.what);
    }
  }
  return words;
}

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
  fail(message("the GPU did not finish within ", limit.count(), " ms: ", what,
               "; quire must end, and start again with the paged or the dense backend"));
}

void Health::require() const {
  const std::lock_guard lock(mutex_);
  quire::require<std::runtime_error>(failure_.empty(), failure_);
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
    refuse_memory(message("a GPU buffer of ", bytes, " bytes"));
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
  // The event's value decides, not the wait's result, because the system may end a wait early.
  event->waitUntilSignaledValue(value, static_cast<uint64_t>(std::max<int64_t>(limit, 0)));
  return event->signaledValue() >= value;
}

}  // namespace quire::metal
