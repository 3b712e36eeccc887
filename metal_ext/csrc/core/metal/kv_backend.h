#pragma once

#include <Metal/Metal.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/address_range.h"
#include "core/heap.h"
#include "core/metal/buffers.h"
#include "core/metal/slots.h"
#include "core/metal/device_range.h"
#include "core/metal/epochs.h"
#include "core/metal/sparse.h"

// The memory of K and V and states on a GPU, through metal-cpp alone: no MLX, no Python.
namespace quire::metal {

// All heaps and ranges of one kind and geometry on one device, with their queues, events and
// residency. The mapper's thread maps; the engine's thread does everything else. Rule: a sparse
// backend without Options::maps_beside_steps maps, unmaps and releases only while no step is in
// flight, and no step starts before finish_mappings(). A violation throws a std::logic_error. Rule:
// the backend owns all device objects that command buffers use, because MLX's command buffers do
// not retain them. Only shutdown() releases them, even if Python drops heaps and ranges before.
class KVBackend {
 public:
  struct Options {
    Kind kind;
    Geometry geometry;
    size_t max_ranges;            // the number of slices on the dense kind
    // Whether mappings may change while steps are in flight, on sparse (else always true).
    bool maps_beside_steps = false;
    size_t max_buffer_bytes = 0;  // 0 for the device's; smaller values force more buffers per range
    std::chrono::nanoseconds timeout = std::chrono::seconds(30);  // time limit of one command
    Residency::Options residency = {};  // make() adds the device's properties
  };
  // Throws std::runtime_error that names missing abilities or a wrong option; std::invalid_argument
  // for a geometry that the kind cannot have; std::system_error(ENOMEM) if memory is refused.
  static std::shared_ptr<KVBackend> make(
      NS::SharedPtr<MTL::Device> device, const Options& options);
  // Calls shutdown(). If that fails, the device objects are never released.
  ~KVBackend();

  // Both throw std::system_error(ENOMEM) when the device refuses or the arena has no slice left.
  std::shared_ptr<Heap> new_heap();
  std::shared_ptr<AddressRange> new_range();
  // Makes the memory of recurrent states. Throws as Slots does, or std::logic_error a second time.
  void make_slots(size_t count, size_t slot_bytes);

  // Returns a range that this backend made. Throws std::invalid_argument for another range.
  DeviceRange& own(AddressRange& range) const;

  Kind kind() const { return context_->kind; }
  const Geometry& geometry() const { return context_->geometry; }
  Epochs& epochs() const { return context_->epochs; }
  Residency& residency() const { return context_->residency; }
  // Returns null before make_slots().
  Slots* slots() const { return slots_.get(); }
  // Returns the buffers per range. A row table has a RowEntry per buffer and row, [buffer][row].
  size_t buffers_per_range() const;
  RegionPlace place(size_t region) const;

  // --- Mapper's thread --- Completes all maps since the last call. On paged and dense, map()
  // itself completes a map. Throws std::runtime_error when the device fails.
  void finish_mappings();
  // Makes the memory of a released heap, so that later maps of the heap's blocks succeed. Throws
  // std::system_error(ENOMEM) when the device refuses.
  void commit(Heap& heap);
  // Waits for the step that last wrote the source block, whose commands must be committed; then
  // copies the block's first `tokens` rows in every region. Throws std::logic_error unless the
  // target may write the block.
  void copy_block(
      AddressRange& source, size_t source_block, AddressRange& target, size_t target_block,
      size_t tokens);

  // Ends in order: waits for the last step, unmaps everything (one unmap at a time), takes the
  // residency sets off their queues, releases buffers, then heaps. The mapper must be idle. Returns
  // false if the device timed out: nothing is released, and the process must end without releasing.
  bool shutdown();
  // Returns an empty string while the device has answered everything in time.
  std::string failure() const { return context_->health.failure(); }

 private:
  KVBackend(NS::SharedPtr<MTL::Device> device, const Options& options);

  void require_running() const;
  bool quiesce();  // returns false if steps may still run

  std::shared_ptr<Context> context_;
  std::shared_ptr<const BufferPlan> plan_;  // sparse only
  std::shared_ptr<Arena> arena_;            // dense only
  size_t most_bytes_;                       // the bytes of the longest buffer
  std::shared_ptr<Slots> slots_;
  mutable std::mutex mutex_;                // guards the two lists below
  std::vector<std::shared_ptr<DeviceHeap>> heaps_;
  std::vector<std::shared_ptr<DeviceRange>> ranges_;
  bool released_ = false;
};

}  // namespace quire::metal
