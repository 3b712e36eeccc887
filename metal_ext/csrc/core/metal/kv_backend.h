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

// A GPU's memory for K, V and recurrent states, used through metal-cpp, without MLX or Python.
namespace quire::metal {

// All heaps and ranges of one kind and geometry on one device, with their queues, events and
// residency sets. The mapper's thread maps, and the engine's thread does everything else.
//
// Rule of the sparse kind without maps_beside_steps: memory is mapped, unmapped or released only if
// no step runs, and no step starts before finish_mappings(). Else std::logic_error is thrown. Rule:
// only shutdown() releases device objects, because MLX's command buffers do not retain them.
class KVBackend {
 public:
  struct Options {
    Kind kind;
    Geometry geometry;
    size_t max_ranges;            // the number of slices on the dense kind
    // True if mappings may change while steps run. Matters on the sparse kind only.
    bool maps_beside_steps = false;
    size_t max_buffer_bytes = 0;  // 0 for the device's; smaller values force more buffers per range
    std::chrono::nanoseconds timeout = std::chrono::seconds(30);  // time limit of one command
    Residency::Options residency = {};  // make() adds the device's properties
  };
  // Throws std::runtime_error if the device lacks something or an option is wrong,
  // std::invalid_argument if this kind of memory cannot have the geometry,
  // std::system_error(ENOMEM) if memory is refused.
  static std::shared_ptr<KVBackend> make(
      NS::SharedPtr<MTL::Device> device, const Options& options);
  // Calls shutdown(). If that fails, the device objects are never released.
  ~KVBackend();

  // new_heap() and new_range() throw std::system_error(ENOMEM) if the device refuses memory, or if
  // the dense kind's buffer has no slice left.
  std::shared_ptr<Heap> new_heap();
  std::shared_ptr<AddressRange> new_range();
  // Makes state slots without memory. Throws what Slots throws, or std::logic_error at a second
  // call.
  void make_slots(size_t count, size_t slot_bytes);
  // Allocates a slot's memory, before a step that uses the slot begins. Returns the bytes of all
  // slots with memory. Throws what Slots::commit() throws, or std::logic_error without slots.
  size_t commit_slot(size_t slot);
  // Moves a slot to or from a file. Throws what Slots::move() throws.
  uint32_t move_slot(Direction direction, size_t slot, int64_t fd, int64_t offset) const;

  // Returns a range that this backend made. Throws std::invalid_argument for another range.
  DeviceRange& own(AddressRange& range) const;

  Kind kind() const { return context_->kind; }
  const Geometry& geometry() const { return context_->geometry; }
  Epochs& epochs() const { return context_->epochs; }
  Residency& residency() const { return context_->residency; }
  Slots* slots() const { return slots_.get(); }
  // Returns the number of buffers per range. A row table has one RowEntry per buffer and row.
  size_t buffers_per_range() const;
  RegionPlace place(size_t region) const;

  // --- Mapper's thread --- Completes all mappings since the last call. On the paged and dense
  // kinds they are complete at once. Throws std::runtime_error if the device fails.
  void finish_mappings();
  // Allocates a released heap's memory again, so that its blocks can be mapped. Throws
  // std::system_error(ENOMEM) if the device refuses.
  void commit(Heap& heap);
  // Waits for the step that last wrote the source block, and copies the block's first `tokens` rows
  // in every region. The step's commands must be committed. Throws std::logic_error if the target
  // range must not write the target block.
  void copy_block(
      AddressRange& source, size_t source_block, AddressRange& target, size_t target_block,
      size_t tokens);

  // Waits for the last step, unmaps everything, removes the residency sets, and releases buffers,
  // then heaps. The mapper must be idle. Returns false if the device timed out: nothing is released
  // then, and the process must end without releasing anything.
  bool shutdown();
  // Returns the message of the device's first failure or timeout, or "".
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
