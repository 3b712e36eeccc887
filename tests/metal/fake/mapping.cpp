#include "mapping.h"

#include <utility>

#include "commands.h"

namespace quire::fake {
namespace {

constexpr uint64_t kMostOperations = 2048;

const auto defined = [] {
  define("MTL4CommandQueue")
      .method<&MappingQueue::update>("updateBufferMappings:heap:operations:count:")
      .method<&MappingQueue::signal>("signalEvent:value:")
      .method<&MappingQueue::add_residency>("addResidencySet:")
      .method<&MappingQueue::remove_residency>("removeResidencySet:");
  return true;
}();

bool is_map(const MappingQueue::Operation& operation) {
  return operation.mode == MTL::SparseTextureMappingModeMap;
}

}  // namespace

bool MappingQueue::check(
    const Buffer& buffer, const Heap* heap, const Operation& operation) const {
  const uint64_t page = operation.bufferRange.location;
  const uint64_t count = operation.bufferRange.length;
  const uint64_t pages = buffer.sparse() ? buffer.length() / buffer.page_bytes() : 0;
  if (pages == 0) {
    report("mappings of a buffer that is not sparse were changed");
  } else if (page > pages || count > pages - page) {
    report("a mapping goes beyond the buffer's pages: bytes where pages are counted?");
  } else if (is_map(operation) && heap == nullptr) {
    report("map: there is no heap");
  } else if (is_map(operation) && heap->page_bytes() != buffer.page_bytes()) {
    report("map: the heap's pages and the buffer's differ");
  } else if (
      is_map(operation) &&
      (operation.heapOffset > heap->pages() || count > heap->pages() - operation.heapOffset)) {
    report("a mapping goes beyond the heap's pages: bytes where pages are counted?");
  } else {
    return true;
  }
  return false;
}

void MappingQueue::check_order(bool unmaps) {
  if (unsignalled_) {
    report("two mapping batches have no signal between them");
  }
  const bool observed = unmap_event_ == nullptr || unmap_event_->seen() >= unmap_value_;
  if (unmaps && (!observed || unsignalled_unmaps_)) {
    report("an unmap was queued before the host saw the last one complete");
  }
}

void MappingQueue::check_idle(bool unmaps, const Buffer& buffer, const Heap* heap) const {
  const Machine& machine = Machine::current();
  for (const CommandBuffer* commands : machine.in_flight) {
    const bool reached =
        commands->may_touch(&buffer) || (heap != nullptr && commands->may_touch(heap));
    if (reached && !machine.maps_beside_commands()) {
      report(
          std::string(unmaps ? "an unmap" : "a map") +
          " was queued of what a command in flight may touch");
      return;
    }
  }
}

void MappingQueue::update(
    Buffer* buffer, Heap* heap, const Operation* operations, uint64_t count) {
  Machine& machine = Machine::current();
  const std::lock_guard lock(machine.mutex);
  if (count == 0 || count > kMostOperations) {
    report("a mapping batch has " + std::to_string(count) + " operations");
  }
  bool unmaps = false;
  for (uint64_t i = 0; i < count; ++i) {
    unmaps |= !is_map(operations[i]);
  }
  check_order(unmaps);
  ++machine.mapping_batches;
  unsignalled_ = true;
  unsignalled_unmaps_ |= unmaps;
  for (uint64_t i = 0; i < count; ++i) {
    const Operation operation = operations[i];
    if (!check(*buffer, heap, operation)) {
      continue;
    }
    const auto place = buffer->pages.find(operation.bufferRange.location);
    check_idle(
        !is_map(operation), *buffer,
        is_map(operation) || place == buffer->pages.end() ? heap : place->second.heap);
    for (uint64_t k = 0; k < operation.bufferRange.length; ++k) {
      const uint64_t page = operation.bufferRange.location + k;
      if (is_map(operation)) {
        unsignalled_pages_.emplace_back(buffer, page);
        continue;
      }
      for (const CommandBuffer* commands : machine.in_flight) {
        if (commands->reaches(buffer, page)) {
          report(
              "an unmap was queued of page " + std::to_string(page) +
              ", which a command in flight uses");
        }
      }
      if (const auto found = buffer->pages.find(page); found != buffer->pages.end()) {
        found->second.leaving = true;
      }
    }
    ++buffer->queued;
    if (heap != nullptr) {
      ++heap->queued;
    }
    enqueue(
        "a mapping", [&machine] { return !machine.mappings_stalled(); },
        [this, buffer, heap, operation] { apply(*buffer, heap, operation); });
  }
}

void MappingQueue::apply(Buffer& buffer, Heap* heap, const Operation& operation) {
  if (!buffer.alive() || (heap != nullptr && !heap->alive())) {
    return;  // reported when it was released
  }
  --buffer.queued;
  if (heap != nullptr) {
    --heap->queued;
  }
  if (!residency_.holds(&buffer) || (heap != nullptr && !residency_.holds(heap))) {
    report("a mapping changes memory that is not resident on its queue");
  }
  for (uint64_t k = 0; k < operation.bufferRange.length; ++k) {
    const uint64_t page = operation.bufferRange.location + k;
    if (is_map(operation)) {
      buffer.map(page, *heap, operation.heapOffset + k);
    } else {
      buffer.unmap(page);
    }
  }
}

void MappingQueue::signal(Event* event, uint64_t value) {
  const std::lock_guard lock(Machine::current().mutex);
  if (unsignalled_unmaps_) {
    unmap_event_ = event;
    unmap_value_ = value;
  }
  unsignalled_ = false;
  unsignalled_unmaps_ = false;
  ++event->queued;
  auto pages = std::exchange(unsignalled_pages_, {});
  enqueue("a signal", nullptr, [event, value, pages = std::move(pages)] {
    for (const auto& [buffer, page] : pages) {
      const auto found = buffer->pages.find(page);
      if (buffer->alive() && found != buffer->pages.end()) {
        found->second.event = event;
        found->second.value = value;
      }
    }
    --event->queued;
    event->signal(value);
  });
}

void MappingQueue::dealloc() {
  WorkQueue::dealloc();
  residency_.release_all();
}

}  // namespace quire::fake
