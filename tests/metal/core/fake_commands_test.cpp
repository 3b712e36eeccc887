#include "fake_stage.h"

namespace quire::fake {
namespace {

TEST("the fake finds commands that touch what they must not") {
  require_found({
      {"page 2 of a sparse buffer, which is not mapped",
       [](Stage& s) { s.command({s.access(2, false)}); }},
      {"whose mapping the host has not seen complete",
       [](Stage& s) {
         s.update(true, 0, 1, 0);
         s.mapping->signalEvent(s.event.get(), ++s.value);
         s.machine.run();
         s.command({s.access(0, false)});
       }},
      {"whose unmap is queued",
       [](Stage& s) {
         s.map(0, 1, 0);
         s.update(false, 0, 1, 0);
         s.command({s.access(0, false)});
         s.signal_and_wait();
       }},
      {"an unmap was queued of page 0, which a command in flight uses",
       [](Stage& s) {
         s.map(0, 1, 0);
         s.command({s.access(0, false)});
         s.unmap(0, 1);
       }},
      {"writes a page that stands at 2 addresses",
       [](Stage& s) {
         s.map(0, 1, 0);
         s.map(1, 1, 0);
         s.command({s.access(1, true)});
       }},
      {"map: a command in flight writes page 0 of the heap",
       [](Stage& s) {
         s.map(0, 1, 0);
         s.update(true, 1, 1, 0);
         auto* const commands = s.queue->commandBufferWithUnretainedReferences();
         commands->encodeWait(s.event.get(), s.value + 1);  // so that it comes last
         encode(commands, "a command", {s.access(0, true)}, [] {});
         commands->commit();
         s.signal_and_wait();
       }},
      {"touches a page that a command in flight touches",
       [](Stage& s) {
         s.map(0, 1, 0);
         const auto other = NS::TransferPtr(s.device->newCommandQueue());
         other->addResidencySet(s.set.get());
         s.command({s.access(0, false)});
         s.command({s.access(0, true)}, other.get());
         s.machine.run();
         other->removeResidencySet(s.set.get());
       }},
      {"an address that is no buffer's", [](Stage& s) { s.command({{16, 16, false}}); }},
      {"beyond the end of a buffer",
       [](Stage& s) {
         s.map(15, 1, 0);
         s.command({{s.buffer->gpuAddress() + 15 * kPage, kPage + 1, false}});
       }},
  });
}

TEST("the fake finds what is released too early, and used too late") {
  require_found({
      {"a heap was released while 2 pages of it are mapped",
       [](Stage& s) {
         s.map(0, 2, 0);
         s.heap.reset();
       }},
      {"a sparse buffer was released while 2 pages of it are mapped",
       [](Stage& s) {
         s.map(0, 2, 0);
         s.buffer.reset();
       }},
      {"a heap was released while a mapping operation of it is queued",
       [](Stage& s) {
         s.update(true, 0, 1, 0);
         s.heap.reset();
       }},
      {"a sparse buffer was released while a mapping operation of it is queued",
       [](Stage& s) {
         s.update(true, 0, 1, 0);
         s.buffer.reset();
       }},
      {"a heap was released while a command is in flight",
       [](Stage& s) {
         const auto other = s.make_heap();
         s.map(0, 1, 0);
         s.command({s.access(0, false)});
       }},
      {"a MTLBuffer was released while a command in flight uses it",
       [](Stage& s) {
         auto plain = NS::TransferPtr(s.device->newBuffer(64, MTL::ResourceStorageModeShared));
         auto* const commands = s.queue->commandBufferWithUnretainedReferences();
         encode(commands, "a command", {}, [] {}, {plain.get()});
         commands->commit();
         plain.reset();
       }},
      {"an event was released while a signal or a wait for it is queued",
       [](Stage& s) {
         s.mapping->signalEvent(s.event.get(), 1);
         s.event.reset();
       }},
      {"a MTL4CommandQueue was released before it came to: a signal",
       [](Stage& s) {
         s.mapping->signalEvent(s.event.get(), 1);
         s.mapping.reset();
       }},
      {"gpuAddress was sent to a released MTLBuffer",
       [](Stage& s) {
         auto* const plain = s.device->newBuffer(64, MTL::ResourceStorageModeShared);
         plain->release();
         plain->gpuAddress();
       }},
      {"unrecognized selector -[MTLBuffer didModifyRange:]",
       [](Stage& s) { s.buffer->didModifyRange(NS::Range(0, 1)); }},
      {"a MTLCommandBuffer was autoreleased where there is no pool",
       [](Stage& s) {
         s.pool.reset();
         s.queue->commandBuffer();
       }},
      {"contents of a buffer that the CPU cannot reach", [](Stage& s) { s.buffer->contents(); }},
      {"was encoded into a command buffer that is committed",
       [](Stage& s) { s.command({})->encodeSignalEvent(s.event.get(), 1); }},
  });
}

}  // namespace
}  // namespace quire::fake
