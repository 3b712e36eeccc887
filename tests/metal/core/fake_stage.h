#pragma once

#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "core/metal/mapping_queue.h"
#include "fake/fake_metal.h"

// The fake is asked to find every mistake that it knows, on metal-cpp alone: a check that never
// fires would be none.
namespace quire::fake {

inline constexpr uint64_t kPage = 65536;

// A sparse buffer of 16 pages, a heap of 4, and the queues, all resident; nothing is mapped.
struct Stage {
  Machine machine;
  NS::SharedPtr<NS::AutoreleasePool> pool =
      NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  NS::SharedPtr<MTL::Device> device = new_device();
  NS::SharedPtr<MTL4::CommandQueue> mapping = NS::TransferPtr(device->newMTL4CommandQueue());
  NS::SharedPtr<MTL::CommandQueue> queue = NS::TransferPtr(device->newCommandQueue());
  NS::SharedPtr<MTL::SharedEvent> event = NS::TransferPtr(device->newSharedEvent());
  NS::SharedPtr<MTL::Heap> heap = make_heap();
  NS::SharedPtr<MTL::Buffer> buffer = make_buffer();
  NS::SharedPtr<MTL::ResidencySet> set;
  uint64_t value = 0;

  Stage() {
    const auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
    NS::Error* error = nullptr;
    set = NS::TransferPtr(device->newResidencySet(descriptor.get(), &error));
    set->addAllocation(heap.get());
    set->addAllocation(buffer.get());
    set->commit();
    set->requestResidency();
    mapping->addResidencySet(set.get());
    queue->addResidencySet(set.get());
  }

  NS::SharedPtr<MTL::Heap> make_heap(
      MTL::HeapType type = MTL::HeapTypePlacement,
      MTL::SparsePageSize page = MTL::SparsePageSize64, size_t bytes = 4 * kPage) {
    const auto descriptor = NS::TransferPtr(MTL::HeapDescriptor::alloc()->init());
    descriptor->setType(type);
    descriptor->setStorageMode(MTL::StorageModePrivate);
    descriptor->setSize(bytes);
    descriptor->setMaxCompatiblePlacementSparsePageSize(page);
    return NS::TransferPtr(device->newHeap(descriptor.get()));
  }
  NS::SharedPtr<MTL::Buffer> make_buffer(
      MTL::ResourceOptions options = MTL::ResourceStorageModePrivate) {
    return NS::TransferPtr(device->newBuffer(16 * kPage, options, MTL::SparsePageSize64));
  }

  void update(bool map, uint64_t page, uint64_t count, uint64_t heap_page) {
    const metal::MappingOperation operation{
        .mode = map ? MTL::SparseTextureMappingModeMap : MTL::SparseTextureMappingModeUnmap,
        .bufferRange = NS::Range(page, count),
        .heapOffset = heap_page};
    mapping->updateBufferMappings(buffer.get(), heap.get(), &operation, 1);
  }
  void signal_and_wait() {
    mapping->signalEvent(event.get(), ++value);
    event->waitUntilSignaledValue(value, 1000);
  }
  void map(uint64_t page, uint64_t count, uint64_t heap_page) {
    update(true, page, count, heap_page);
    signal_and_wait();
  }
  void unmap(uint64_t page, uint64_t count) {
    update(false, page, count, 0);
    signal_and_wait();
  }
  Access access(uint64_t page, bool write) const {
    return {buffer->gpuAddress() + page * kPage, 16, write};
  }
  // A command of its own buffer, committed.
  MTL::CommandBuffer* command(std::vector<Access> accesses, MTL::CommandQueue* on = nullptr) {
    auto* const commands =
        (on == nullptr ? queue.get() : on)->commandBufferWithUnretainedReferences();
    encode(commands, "a command", std::move(accesses), [] {});
    commands->commit();
    return commands;
  }
};

// A mistake, and the words in which the machine must report it.
struct Mistake {
  const char* words;
  std::function<void(Stage&)> make;
};

inline void require_found(const std::vector<Mistake>& mistakes) {
  for (const Mistake& mistake : mistakes) {
    Stage stage;
    stage.machine.run();
    CHECK_CASE(stage.machine.errors().empty(), stage.machine.errors().front());
    mistake.make(stage);
    stage.machine.run();
    bool found = false;
    std::string others;
    for (const std::string& error : stage.machine.take_errors()) {
      found |= error.find(mistake.words) != std::string::npos;
      others += error + "; ";
    }
    CHECK_CASE(found, std::string(mistake.words) + " (instead: " + others + ")");
  }
}

}  // namespace quire::fake
