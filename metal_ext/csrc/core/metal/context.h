#pragma once

#include <Metal/Metal.hpp>

#include <chrono>
#include <memory>
#include <mutex>

#include "core/geometry.h"
#include "core/heap.h"
#include "core/metal/epochs.h"
#include "core/metal/gpu.h"
#include "core/metal/queues.h"
#include "core/metal/residency.h"
#include "core/metal/staging.h"

namespace quire::metal {

class Bundle;
class DeviceHeap;

// The objects that all heaps and ranges of one GPU's memory share and keep alive.
struct Context {
  // Throws std::runtime_error with everything that the device lacks for this kind of memory.
  Context(
      NS::SharedPtr<MTL::Device> device, Kind kind, const Geometry& geometry,
      bool maps_beside_steps, std::chrono::nanoseconds timeout,
      Residency::Options residency_options);
  ~Context();

  const NS::SharedPtr<MTL::Device> device;
  const Capabilities capabilities;
  const Kind kind;
  const Geometry geometry;
  // True if mappings may change while steps run. Always true on the paged and dense kinds.
  const bool maps_beside_steps;
  Health health;
  Epochs epochs;
  Residency residency;
  // Guards every heap's BlockLedger and every range's record of mappings and uses.
  std::mutex books;
  bool ended = false;  // guarded by books; once true, nothing new begins
  // Taken while mappings or residency sets change, and while a record is blitted.
  Turns turns;
  // The next four members are null unless the memory is of the sparse kind.
  std::unique_ptr<MappingQueue> mapping;
  std::unique_ptr<BlockWork> work;
  std::unique_ptr<Bundle> bundle;
  std::unique_ptr<Staging> staging;

  // Makes new memory resident before its first use, in a turn. Throws std::system_error(ENOMEM) if
  // no residency set can take the memory now.
  void settle();
  // Returns a Pause, during which no step starts, or throws std::logic_error if a step runs. Rule:
  // without maps_beside_steps, memory is mapped, unmapped and released only during a Pause.
  Epochs::Pause mapping_point(const char* what);
  // Throws std::logic_error after shutdown. The caller must hold the mutex `books`.
  void require_running() const;
  // Waits for a step, or records that the device has failed, and throws std::runtime_error.
  void wait_for(uint64_t epoch, const char* what);
  // Returns a heap of this memory. Throws std::invalid_argument for another heap.
  DeviceHeap& own(Heap& heap) const;
};

}  // namespace quire::metal
