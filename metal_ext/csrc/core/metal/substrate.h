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
#include "core/metal/cells.h"
#include "core/metal/device_range.h"
#include "core/metal/epochs.h"
#include "core/metal/sparse.h"

// Device memory on Metal, through metal-cpp alone: no MLX, no Python.
namespace quire::metal {

// Heaps and ranges of one kind and geometry on one device, with everything that they need: queues,
// events, residency. Threads: mapping happens on the thread of a core/mapper.h Mapper, everything
// else on the engine's.
//
// Rule: a sparse substrate without Options::maps_beside_steps maps, unmaps and releases only while
// no epoch is in flight, and no epoch starts before finish_mappings() where something was mapped:
// what breaks it is a std::logic_error that names the epoch.
//
// Rule: it owns all device objects that command buffers use, because MLX's do not retain them, and
// lets go of them in shutdown() alone. Heaps and ranges that Python drops stay until then.
class Substrate {
 public:
  struct Options {
    Kind kind;
    Geometry geometry;
    size_t max_ranges;            // dense: slices of the arena
    // Sparse: whether mappings may change while any step is in flight.
    bool maps_beside_steps = false;
    size_t max_buffer_bytes = 0;  // 0: the device's; smaller values force more buffers per range
    std::chrono::nanoseconds timeout = std::chrono::seconds(30);  // of one command
    Residency::Options residency = {};  // the device's own properties are added
  };
  // Throws std::runtime_error that names everything that the device lacks for that kind, or the
  // figure that does not fit; std::invalid_argument for a geometry that the kind cannot have;
  // std::system_error(ENOMEM) where the device refuses.
  static std::shared_ptr<Substrate> make(
      NS::SharedPtr<MTL::Device> device, const Options& options);
  // As shutdown(). Where that fails, device objects are left as they are for good.
  ~Substrate();

  // std::system_error(ENOMEM) where the device refuses, or the arena has no slice left.
  std::shared_ptr<Heap> new_heap();
  std::shared_ptr<AddressRange> new_range();
  // Memory for the states of recurrent layers, whole: once, before the first step. As Cells, and
  // std::logic_error the second time.
  void make_cells(size_t count, size_t cell_bytes);

  // The range as this substrate's. Throws std::invalid_argument where it is not.
  DeviceRange& own(AddressRange& range) const;

  Kind kind() const { return context_->kind; }
  const Geometry& geometry() const { return context_->geometry; }
  Epochs& epochs() const { return context_->epochs; }
  Residency& residency() const { return context_->residency; }
  // Null before make_cells().
  Cells* cells() const { return cells_.get(); }
  // Buffers per range: a row table has one RowEntry per row and buffer, [buffer][row].
  size_t buffers_per_range() const;
  RegionPlace place(size_t region) const;

  // --- for the mapper's thread ------------------------------------------------------------------
  // All maps since the last call are there, and count, when it returns. Nothing to do with
  // Options::maps_beside_steps, and where nothing is sparse: there each is when map() returns.
  // Throws std::runtime_error where the device fails.
  void finish_mappings();
  // Makes the memory of a heap that was released, if it was: after that none of its blocks is
  // refused for want of it. Throws std::system_error(ENOMEM) where the device refuses.
  void commit(Heap& heap);
  // The first `tokens` rows of a block, in every region; done when it returns. Waits for the epoch
  // that last wrote the source, which must have been handed to the device. Throws std::logic_error
  // where the target's block is not its own to write.
  void copy_block(
      AddressRange& source, size_t source_block, AddressRange& target, size_t target_block,
      size_t tokens);

  // Ordered end: waits for the last epoch, unmaps everything (paced), takes the residency sets off
  // their queues, releases buffers, then heaps. The mapper must have nothing left to do. False
  // where the device did not answer in time: then nothing is released, and the process must end
  // without releasing.
  bool shutdown();
  // Empty while the device has answered everything in time.
  std::string failure() const { return context_->health.failure(); }

 private:
  Substrate(NS::SharedPtr<MTL::Device> device, const Options& options);

  void require_running() const;
  bool quiesce();  // nothing runs and nothing is mapped any more; false where that failed

  std::shared_ptr<Context> context_;
  std::shared_ptr<const BufferPlan> plan_;  // sparse
  std::shared_ptr<Arena> arena_;            // dense
  size_t most_bytes_;                       // of a buffer
  std::shared_ptr<Cells> cells_;
  mutable std::mutex mutex_;                // guards the lists
  std::vector<std::shared_ptr<DeviceHeap>> heaps_;
  std::vector<std::shared_ptr<DeviceRange>> ranges_;
  bool released_ = false;
};

}  // namespace quire::metal
