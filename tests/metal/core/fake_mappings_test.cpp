#include "fake_stage.h"

namespace quire::fake {
namespace {

TEST("the fake finds mappings that cannot be") {
  require_found({
      {"page 3 of the buffer is mapped already",
       [](Stage& s) {
         s.map(3, 1, 0);
         s.map(3, 1, 1);
       }},
      {"page 5 of the buffer is not mapped", [](Stage& s) { s.unmap(5, 1); }},
      {"beyond the buffer's pages: bytes", [](Stage& s) { s.map(kPage, kPage, 0); }},
      {"beyond the heap's pages: bytes", [](Stage& s) { s.map(0, 1, kPage); }},
      {"beyond the heap's pages", [](Stage& s) { s.map(0, 2, 3); }},
      {"there is no heap",
       [](Stage& s) {
         s.heap.reset();
         s.map(0, 1, 0);
       }},
      {"pages and the buffer's differ",
       [](Stage& s) {
         s.heap = s.make_heap(MTL::HeapTypePlacement, MTL::SparsePageSize256);
         s.map(0, 1, 0);
       }},
      {"not sparse",
       [](Stage& s) {
         s.buffer = NS::TransferPtr(s.device->newBuffer(kPage, MTL::ResourceStorageModeShared));
         s.map(0, 1, 0);
       }},
      {"a mapping batch has 0 operations",
       [](Stage& s) { s.mapping->updateBufferMappings(s.buffer.get(), nullptr, nullptr, 0); }},
  });
}

TEST("the fake finds mapping batches in the wrong order") {
  require_found({
      {"two mapping batches have no signal between them",
       [](Stage& s) {
         s.update(true, 0, 1, 0);
         s.update(true, 1, 1, 1);
       }},
      {"an unmap was queued before the host saw the last one complete",
       [](Stage& s) {
         s.map(0, 2, 0);
         s.update(false, 0, 1, 0);
         s.mapping->signalEvent(s.event.get(), ++s.value);
         s.update(false, 1, 1, 0);
       }},
      {"deadlock: nothing will ever let go on: a wait for the value 7",
       [](Stage& s) { s.mapping->wait(s.event.get(), 7); }},
      {"an event at 2 was signalled with 2",
       [](Stage& s) {
         s.mapping->signalEvent(s.event.get(), 2);
         s.mapping->signalEvent(s.event.get(), 2);
       }},
  });
}

TEST("the fake finds mappings that change beside commands, whatever these are known to touch") {
  const std::vector<Mistake> mistakes = {
      {"an unmap was queued of what a command in flight may touch",
       [](Stage& s) {
         s.map(0, 2, 0);
         s.command({s.access(1, false)});
         s.unmap(0, 1);
       }},
      {"an unmap was queued of what a command in flight may touch",  // the tile, not the buffer
       [](Stage& s) {
         s.map(0, 1, 0);
         s.set->removeAllocation(s.buffer.get());
         s.set->commit();
         s.command({});
         s.update(false, 0, 1, 0);
         s.signal_and_wait();
       }},
      {"a map was queued of what a command in flight may touch",
       [](Stage& s) {
         s.map(0, 1, 0);
         s.command({s.access(0, false)});
         s.map(1, 1, 1);
       }},
      {"a command was committed that may touch what a queued mapping is about to change",
       [](Stage& s) {
         s.map(0, 1, 0);
         s.update(true, 1, 1, 1);
         s.command({s.access(0, false)});
         s.signal_and_wait();
       }},
  };
  require_found(mistakes);
  for (const size_t allowed : {0, 2, 3}) {
    Stage stage;
    stage.machine.allow_maps_beside_commands(true);
    mistakes[allowed].make(stage);
    stage.machine.run();
    CHECK_CASE(stage.machine.take_errors().empty(), mistakes[allowed].words);
  }
}

TEST("the fake finds heaps and buffers that are not resident where they are used") {
  const auto without = [](MTL::Allocation* allocation, Stage& s) {
    s.set->removeAllocation(allocation);
    s.set->commit();
  };
  const auto added_late = [](Stage& s, bool commit, bool request) {
    s.heap = s.make_heap();
    s.set->addAllocation(s.heap.get());
    if (commit) {
      s.set->commit();
    }
    if (request) {
      s.set->requestResidency();
    }
    s.map(0, 1, 0);
  };
  constexpr const char* kMapping = "not resident on its queue";
  require_found({
      {kMapping,
       [=](Stage& s) {
         without(s.heap.get(), s);
         s.map(0, 1, 0);
       }},
      {kMapping,
       [=](Stage& s) {
         without(s.buffer.get(), s);
         s.map(0, 1, 0);
       }},
      {kMapping, [=](Stage& s) { added_late(s, false, true); }},  // never committed
      {kMapping, [=](Stage& s) { added_late(s, true, false); }},  // never requested
      {kMapping,
       [](Stage& s) {
         s.mapping->removeResidencySet(s.set.get());
         s.map(0, 1, 0);
       }},
      {"reaches a heap that is not resident",
       [=](Stage& s) {
         s.map(0, 1, 0);
         without(s.heap.get(), s);
         s.command({s.access(0, false)});
       }},
      {"reaches a buffer that is not resident",
       [](Stage& s) {
         s.map(0, 1, 0);
         const auto other = NS::TransferPtr(s.device->newCommandQueue());
         s.command({s.access(0, false)}, other.get());
         s.machine.run();
       }},
      {"left a residency set while a command in flight uses it",
       [=](Stage& s) {
         s.map(0, 1, 0);
         s.command({s.access(0, false)});
         without(s.buffer.get(), s);
       }},
      {"a residency set changed while a command in flight has it",
       [=](Stage& s) {
         const auto other = s.make_heap();
         s.command({});
         s.set->addAllocation(other.get());
         s.set->commit();
         s.machine.run();
         s.set->removeAllocation(other.get());
         s.set->commit();
       }},
      {"a residency set ended while a command in flight has it",
       [](Stage& s) {
         s.command({});
         s.set->endResidency();
       }},
      {"a residency set was taken off a queue while a command in flight has it",
       [](Stage& s) {
         s.command({});
         s.mapping->removeResidencySet(s.set.get());
       }},
      {"nobody had used or asked for what it reaches since a second",
       [](Stage& s) {
         s.map(0, 1, 0);
         s.machine.pass(std::chrono::milliseconds(900));
         s.set->requestResidency();
         s.machine.pass(std::chrono::milliseconds(900));
         s.command({s.access(0, false)});
         s.machine.run();
         s.machine.pass(std::chrono::milliseconds(900));
         s.command({s.access(0, false)});
         s.machine.run();
         if (!s.machine.errors().empty()) {
           s.machine.report("it should not have been reported yet");
           return;
         }
         s.machine.pass(std::chrono::milliseconds(1100));
         s.command({s.access(0, false)});
       }},
      {"a queue has 33 residency sets",
       [](Stage& s) {
         const auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
         NS::Error* error = nullptr;
         for (int i = 0; i < 32; ++i) {
           s.queue->addResidencySet(s.device->newResidencySet(descriptor.get(), &error));
         }
       }},
      {"added to a queue that has it", [](Stage& s) { s.queue->addResidencySet(s.set.get()); }},
      {"removed from a queue that does not have it",
       [](Stage& s) {
         s.queue->removeResidencySet(s.set.get());
         s.queue->removeResidencySet(s.set.get());
       }},
      {"was released while a residency set holds it",
       [](Stage& s) { s.heap.reset(); }},
      {"a residency set was released while a queue has it", [](Stage& s) { s.set.reset(); }},
  });
}

TEST("the fake finds heaps and buffers that no device makes") {
  require_found({
      {"must be a private placement heap of whole pages",
       [](Stage& s) { s.make_heap(MTL::HeapTypeSparse); }},
      {"must be a private placement heap of whole pages",
       [](Stage& s) { s.make_heap(MTL::HeapTypePlacement, MTL::SparsePageSize64, kPage + 1); }},
      {"must have private storage",
       [](Stage& s) { s.make_buffer(MTL::ResourceStorageModeShared); }},
      {"a sparse buffer of 65537 bytes",
       [](Stage& s) {
         s.device->newBuffer(kPage + 1, MTL::ResourceStorageModePrivate, MTL::SparsePageSize64);
       }},
      {"the page size 65536",
       [](Stage& s) {
         s.device->newBuffer(
             kPage, MTL::ResourceStorageModePrivate, static_cast<MTL::SparsePageSize>(kPage));
       }},
  });
}

}  // namespace
}  // namespace quire::fake
