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

// The objects that all heaps and ranges of one substrate share. It outlives them.
struct Context {
  // Throws std::runtime_error that names everything that the device lacks for that kind.
  Context(
      NS::SharedPtr<MTL::Device> device, Kind kind, const Geometry& geometry,
      bool maps_beside_steps, std::chrono::nanoseconds timeout,
      Residency::Options residency_options);
  ~Context();

  const NS::SharedPtr<MTL::Device> device;
  const Capabilities capabilities;
  const Kind kind;
  const Geometry geometry;
  // True where mappings change while steps are in flight. Only on sparse may that be forbidden.
  const bool maps_beside_steps;
  Health health;
  Epochs epochs;
  Residency residency;
  // Guards every heap's ledger, and every range's record of what is mapped and when it was used.
  std::mutex books;
  bool ended = false;  // guarded by books: nothing new begins
  // Sparse only.
  std::unique_ptr<MappingQueue> mapping;
  std::unique_ptr<BlockWork> work;
  std::unique_ptr<Bundle> bundle;

  // Before anything touches new memory: puts it into residency sets, and asks for these. Mapper's
  // thread. Throws std::system_error(ENOMEM) where there is no set for it now.
  void settle();
  // Rule: where mappings do not change beside steps, blocks are mapped and unmapped, and heaps
  // released, only while no epoch is in flight; as long as the pause lives none starts. Throws
  // std::logic_error that names the epoch: `what` "cannot be ...".
  Epochs::Pause mapping_point(const char* what);
  // Throws std::logic_error where the substrate has ended. Under books.
  void require_running() const;
};

}  // namespace quire::metal
