#pragma once

#include <Metal/Metal.hpp>

#include <chrono>
#include <memory>
#include <mutex>

#include "core/geometry.h"
#include "core/metal/epochs.h"
#include "core/metal/gpu.h"
#include "core/metal/queues.h"
#include "core/metal/residency.h"

namespace quire::metal {

class Bundle;

// Objects that all heaps and ranges of one backend (a device's memory) share and keep alive.
struct Context {
  // Throws std::runtime_error that names everything that the device lacks for the kind.
  Context(
      NS::SharedPtr<MTL::Device> device, Kind kind, const Geometry& geometry,
      bool maps_beside_steps, std::chrono::nanoseconds timeout,
      Residency::Options residency_options);
  ~Context();

  const NS::SharedPtr<MTL::Device> device;
  const Capabilities capabilities;
  const Kind kind;
  const Geometry geometry;
  // Whether mappings may change while steps are in flight. Only sparse may have false.
  const bool maps_beside_steps;
  Health health;
  Epochs epochs;
  Residency residency;
  // Guards every heap's BlockLedger and every range's record of mappings and uses.
  std::mutex books;
  bool ended = false;  // guarded by books; once true, nothing new begins
  // The next three are null except on the sparse kind.
  std::unique_ptr<MappingQueue> mapping;
  std::unique_ptr<BlockWork> work;
  std::unique_ptr<Bundle> bundle;

  // Makes new memory resident before its first use, on the mapper's thread. Throws
  // std::system_error(ENOMEM) when no residency set can take the memory now.
  void settle();
  // Rule: without maps_beside_steps, blocks are mapped and unmapped, and heaps released, only while
  // no step is in flight (else std::logic_error). No step starts during the pause.
  Epochs::Pause mapping_point(const char* what);
  // Throws std::logic_error after the backend's end. The caller holds books.
  void require_running() const;
};

}  // namespace quire::metal
