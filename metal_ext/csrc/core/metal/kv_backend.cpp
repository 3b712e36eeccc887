#include "core/metal/kv_backend.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "core/checked.h"

// Implements the GPU's memory as a whole: it makes heaps and ranges, and shuts down in order.
namespace quire::metal {

std::shared_ptr<KVBackend> KVBackend::make(
    NS::SharedPtr<MTL::Device> device, const Options& options) {
  return std::shared_ptr<KVBackend>(new KVBackend(std::move(device), options));
}

KVBackend::KVBackend(NS::SharedPtr<MTL::Device> device, const Options& options) {
  switch (options.kind) {  // checks that depend on no device come first
    case Kind::sparse:
      sparse_page_size(options.geometry.page_bytes());
      if (options.geometry.ring_blocks() > 0) {
        require_equal_rows(options.geometry);
      }
      break;
    case Kind::paged:
      require_equal_rows(options.geometry);
      break;
    case Kind::dense:
      require_one_block(options.geometry);
      break;
  }
  context_ = std::make_shared<Context>(
      std::move(device), options.kind, options.geometry, options.maps_beside_steps,
      options.timeout, options.residency);
  most_bytes_ = context_->capabilities.max_buffer_bytes;
  if (options.max_buffer_bytes > 0) {
    most_bytes_ = std::min(most_bytes_, options.max_buffer_bytes);
  }
  switch (options.kind) {
    case Kind::sparse:
      plan_ = std::make_shared<const BufferPlan>(options.geometry, most_bytes_);
      break;
    case Kind::paged:
      require<std::runtime_error>(
          options.geometry.heap_bytes() <= most_bytes_, "a heap has ",
          options.geometry.heap_bytes(), " bytes, but a buffer has ", most_bytes_, " at most");
      break;
    case Kind::dense:
      arena_ = std::make_shared<Arena>(*context_, options.max_ranges, most_bytes_);
      break;
  }
}

std::shared_ptr<Heap> KVBackend::new_heap() {
  const std::lock_guard lock(mutex_);
  require_running();
  std::shared_ptr<DeviceHeap> heap;
  switch (kind()) {
    case Kind::sparse:
      heap = std::make_shared<PlacementHeap>(context_);
      break;
    case Kind::paged:
      heap = std::make_shared<ExtentHeap>(context_);
      break;
    case Kind::dense:
      if (heaps_.size() == arena_->slices()) {
        refuse_memory(message("the dense backend has no more than ", arena_->slices(), " slices"));
      }
      heap = std::make_shared<ArenaHeap>(context_, arena_, heaps_.size());
      break;
  }
  heap->commit();
  heaps_.push_back(heap);
  return heap;
}

std::shared_ptr<AddressRange> KVBackend::new_range() {
  const std::lock_guard lock(mutex_);
  require_running();
  std::shared_ptr<DeviceRange> range;
  switch (kind()) {
    case Kind::sparse:
      range = std::make_shared<SparseBufferRange>(context_, plan_);
      break;
    case Kind::paged:
      range = std::make_shared<PagedRange>(context_);
      break;
    case Kind::dense:
      range = std::make_shared<ArenaRange>(context_, arena_);
      break;
  }
  ranges_.push_back(range);
  return range;
}

void KVBackend::make_slots(size_t count, size_t slot_bytes) {
  const std::lock_guard lock(mutex_);
  require_running();
  require<std::logic_error>(slots_ == nullptr, "the backend has slots already");
  slots_ = std::make_shared<Slots>(*context_, count, slot_bytes, most_bytes_);
}

size_t KVBackend::commit_slot(size_t slot) {
  const std::lock_guard lock(mutex_);
  require_running();
  require<std::logic_error>(slots_ != nullptr, "the backend has no slots");
  slots_->commit(slot);
  context_->settle();  // also for a buffer that the device has refused a residency set before
  return slots_->committed_bytes();
}

uint32_t KVBackend::move_slot(
    Direction direction, size_t slot, int64_t fd, int64_t offset) const {
  require_running();
  require<std::logic_error>(slots_ != nullptr, "the backend has no slots");
  return slots_->move(direction, slot, fd, offset);
}

void KVBackend::require_running() const {
  context_->health.require();
  const std::lock_guard books(context_->books);
  context_->require_running();
}

DeviceRange& KVBackend::own(AddressRange& range) const {
  auto* const device_range = dynamic_cast<DeviceRange*>(&range);
  require<std::invalid_argument>(
      device_range != nullptr && device_range->context() == context_,
      "the range is not of this backend");
  return *device_range;
}

size_t KVBackend::buffers_per_range() const {
  return plan_ == nullptr ? 1 : plan_->bytes.size();
}

RegionPlace KVBackend::place(size_t region) const {
  require<std::out_of_range>(
      region < geometry().regions(), "region ", region, " of ", geometry().regions());
  switch (kind()) {
    case Kind::sparse:
      return plan_->places[region];
    case Kind::paged:
      return {0, geometry().heap_region_offset(region)};
    case Kind::dense:
      return {0, geometry().range_region_offset(region)};
  }
  throw std::logic_error("no such kind of backend");
}

void KVBackend::finish_mappings() {
  if (context_->bundle != nullptr) {
    context_->bundle->finish();
  }
}

void KVBackend::commit(Heap& heap) {
  DeviceHeap& own = context_->own(heap);
  require_running();
  own.commit();
}

void KVBackend::copy_block(
    AddressRange& source, size_t source_block, AddressRange& target, size_t target_block,
    size_t tokens) {
  own(target).copy_from(own(source), source_block, target_block, tokens);
}

// Rule: the order is steps, mappings, residency, buffers, heaps. If the device does not answer,
// nothing is released.
bool KVBackend::shutdown() {
  const std::lock_guard lock(mutex_);
  if (released_) {
    return true;
  }
  {
    const std::lock_guard books(context_->books);
    context_->ended = true;
  }
  if (!quiesce()) {
    return false;
  }
  context_->residency.end();
  for (const auto& range : ranges_) {
    range->drop();
  }
  if (arena_ != nullptr) {
    arena_->drop();
  }
  if (slots_ != nullptr) {
    slots_->drop();
  }
  for (const auto& heap : heaps_) {
    heap->drop();
  }
  context_->staging.reset();
  context_->work.reset();
  context_->mapping.reset();
  released_ = true;
  return true;
}

bool KVBackend::quiesce() {
  try {
    context_->health.require();
    context_->wait_for(context_->epochs.newest(), "shutting down");
    if (context_->bundle != nullptr) {
      context_->bundle->withdraw();
    }
    for (const auto& range : ranges_) {
      range->unmap_all();
    }
    return true;
  } catch (const std::runtime_error&) {
    return false;  // failure() has the message
  }
}

KVBackend::~KVBackend() {
  bool ended = false;
  try {
    ended = shutdown();
  } catch (const std::exception&) {  // after a bug too, nothing is released
  }
  if (!ended) {
    // This memory is never released, because commands of the GPU may still use it.
    new std::tuple(context_, arena_, slots_, std::move(heaps_), std::move(ranges_));
  }
}

}  // namespace quire::metal
