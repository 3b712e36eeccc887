#include <stdexcept>

#include "bench.h"
#include "check.h"

// Backends that map, unmap and release only while no step is in flight: the machine reports what
// a command in flight may touch.
namespace quire::metal {
namespace {

using test::throws;

// How often the device was asked, and waited for, since the last time.
struct Asked {
  uint64_t batches;
  uint64_t commands;
  uint64_t waits;
  bool operator==(const Asked&) const = default;
};

Asked take_asked(Bench& bench) {
  const std::lock_guard lock(bench.machine.mutex);
  return {std::exchange(bench.machine.mapping_batches, 0), std::exchange(bench.machine.commits, 0),
          std::exchange(bench.machine.waits, 0)};
}

struct Quiet {
  explicit Quiet(fake::Options machine = {}, KVBackend::Options shape = Bench::quiet_shape())
      : bench(Kind::sparse, std::move(machine), shape),
        heap(bench.kv_backend->new_heap()),
        one(bench.kv_backend->new_range()),
        other(bench.kv_backend->new_range()) {}

  void map(AddressRange& range, int64_t heap_block, int64_t block, int64_t count = 1) {
    range.map(heap, heap_block, block, count, true);
  }
  void finish() { bench.kv_backend->finish_mappings(); }
  // One mapped block, and a step over it that is in flight.
  Bench::Step begin() {
    map(*one, 0, 0);
    finish();
    return bench.step({{one.get(), 0, {}, {1}}});
  }
  void finish(const Bench::Step& step) {
    CHECK(bench.kv_backend->epochs().wait(step.epoch, std::chrono::seconds(10)));
  }

  Bench bench;
  std::shared_ptr<Heap> heap;
  std::shared_ptr<AddressRange> one;
  std::shared_ptr<AddressRange> other;
};

// --- a bundle ----------------------------------------------------------------------------------

TEST("all maps of a bundle are waited for once, and filled by one command") {
  Quiet quiet;
  take_asked(quiet.bench);
  quiet.map(*quiet.one, 0, 0);
  quiet.map(*quiet.one, 1, 1, 2);
  quiet.map(*quiet.other, 3, 0);
  CHECK(take_asked(quiet.bench) == Asked{});
  quiet.finish();
  CHECK(take_asked(quiet.bench) == (Asked{.batches = 3, .commands = 1, .waits = 2}));
  CHECK(quiet.one->mapped_tokens() == 48 && quiet.other->mapped_tokens() == 16);
  std::vector<std::string> mistakes;
  const auto& kv_backend = quiet.bench.metal();
  check_rows(RowPlaces(kv_backend, *quiet.one, 48), kv_backend.geometry(), {}, 48, mistakes);
  check_rows(RowPlaces(kv_backend, *quiet.other, 16), kv_backend.geometry(), {}, 16, mistakes);
  CHECK_CASE(mistakes.empty(), mistakes.front());
  quiet.finish();
  CHECK(take_asked(quiet.bench) == Asked{});  // there was nothing to finish
}

TEST("what is only shared needs no filling") {
  Quiet quiet;
  quiet.finish(quiet.begin());
  quiet.other->map(quiet.heap, 0, 0, 1, false);
  take_asked(quiet.bench);
  quiet.finish();
  CHECK(take_asked(quiet.bench) == (Asked{.batches = 1, .commands = 0, .waits = 1}));
  quiet.bench.step({{quiet.other.get(), 1, {1}, {}}});
}

TEST("batches of 2048 operations have a signal each, and one wait") {
  auto shape = Bench::quiet_shape();
  shape.geometry = Geometry(16384, 16, 2, 2, std::vector<int64_t>(2100, 1024));
  shape.max_ranges = 2;
  Quiet quiet({}, shape);
  take_asked(quiet.bench);
  quiet.map(*quiet.one, 0, 0, 2);
  quiet.finish();
  CHECK(take_asked(quiet.bench) == (Asked{.batches = 2, .commands = 1, .waits = 2}));
  quiet.one->unmap(0, 2);
  CHECK(take_asked(quiet.bench) == (Asked{.batches = 2, .commands = 0, .waits = 2}));
}

TEST("every unmap is seen complete before the next one, and before the maps that follow") {
  Quiet quiet;
  quiet.map(*quiet.one, 0, 0, 3);
  quiet.finish();
  take_asked(quiet.bench);
  quiet.one->unmap(2, 1);
  quiet.one->unmap(0, 2);
  CHECK(take_asked(quiet.bench) == (Asked{.batches = 2, .commands = 0, .waits = 2}));
  quiet.map(*quiet.other, 0, 0, 3);
  quiet.finish();
  quiet.bench.step({{quiet.other.get(), 0, {}, {1}}});
}

TEST("blocks count as mapped when the bundle is finished, and no step begins before") {
  Quiet quiet;
  quiet.map(*quiet.one, 0, 0);
  CHECK(quiet.one->mapped_tokens() == 0);
  CHECK(throws<std::logic_error>("about to be mapped already", [&] { quiet.map(*quiet.one, 1, 0); }));
  CHECK(throws<std::logic_error>("without memory", [&] {
    quiet.bench.kv_backend->copy_block(*quiet.one, 0, *quiet.one, 0, 1);
  }));
  CHECK(throws<std::logic_error>("a step cannot begin before mappings are finished", [&] {
    quiet.bench.step({{quiet.one.get(), 0, {}, {1}}});
  }));
  quiet.finish();
  quiet.bench.step({{quiet.one.get(), 0, {}, {1}}});
}

TEST("what is unmapped again at the same point was mapped first") {
  Quiet quiet;
  quiet.map(*quiet.one, 0, 0, 2);
  quiet.map(*quiet.other, 2, 0);
  quiet.one->unmap(1, 1);
  CHECK(quiet.one->mapped_tokens() == 16 && quiet.other->mapped_tokens() == 16);
  quiet.map(*quiet.other, 1, 1);
  quiet.finish();
  quiet.bench.step({{quiet.one.get(), 0, {}, {1}}, {quiet.other.get(), 0, {}, {2, 3}}});
}

TEST("where mappings change beside steps each is done when it returns") {
  Bench bench(Kind::sparse);
  const auto heap = bench.kv_backend->new_heap();
  const auto range = bench.kv_backend->new_range();
  take_asked(bench);
  range->map(heap, 0, 0, 2, true);
  CHECK(take_asked(bench) == (Asked{.batches = 1, .commands = 1, .waits = 2}));
  CHECK(range->mapped_tokens() == 32);
  bench.kv_backend->finish_mappings();
  CHECK(take_asked(bench) == Asked{});
}

// --- only while no step is in flight -----------------------------------------------------------

TEST("nothing is mapped, unmapped or released while a step is in flight, whatever it uses") {
  Quiet quiet({.slowness = 20});
  const auto idle = quiet.bench.kv_backend->new_heap();
  quiet.map(*quiet.other, 1, 0);
  const auto step = quiet.begin();
  quiet.bench.machine.freeze(true);  // a step that ends soon would be waited for
  const std::string in_flight = "while epoch 1 is in flight";
  CHECK(throws<std::logic_error>("blocks cannot be mapped " + in_flight, [&] {
    quiet.map(*quiet.other, 2, 1);
  }));
  CHECK(throws<std::logic_error>("blocks cannot be mapped " + in_flight, [&] {
    quiet.other->map(quiet.heap, 0, 1, 1, false);
  }));
  CHECK(throws<std::logic_error>("blocks cannot be unmapped " + in_flight, [&] {
    quiet.other->unmap(0, 1);
  }));
  CHECK(throws<std::logic_error>("a heap cannot be released " + in_flight, [&] {
    idle->release(0, 4);
  }));
  CHECK(idle->committed_bytes() > 0);
  quiet.bench.machine.freeze(false);
  quiet.finish(step);
  quiet.map(*quiet.other, 2, 1);
  idle->release(0, 4);
  quiet.finish();
  CHECK(idle->committed_bytes() == 0);
  quiet.bench.step({{quiet.one.get(), 1, {1}, {}}});
}

TEST("memory that a step in flight reads through its own addresses is not unmapped elsewhere") {
  Quiet quiet({.slowness = 20});
  quiet.finish(quiet.begin());
  quiet.other->map(quiet.heap, 0, 0, 1, false);
  quiet.finish();
  const auto step = quiet.bench.step({{quiet.one.get(), 1, {1}, {}}});
  quiet.bench.machine.freeze(true);
  CHECK(throws<std::logic_error>("while epoch 2", [&] { quiet.other->unmap(0, 1); }));
  quiet.bench.machine.freeze(false);
  quiet.finish(step);
}

TEST("no step begins while the device maps or unmaps") {
  Quiet quiet({.slowness = 20});
  unsigned tried = 0;
  quiet.bench.machine.while_waiting([&] {
    ++tried;
    CHECK(throws<std::logic_error>("a step cannot begin", [&] {
      quiet.bench.kv_backend->epochs().start();
    }));
  });
  quiet.map(*quiet.one, 0, 0);
  quiet.finish();
  CHECK(std::exchange(tried, 0) > 0);
  quiet.one->unmap(0, 1);
  CHECK(tried > 0);
  quiet.bench.machine.while_waiting(nullptr);
}

TEST("an epoch that was given up is not in flight") {
  Quiet quiet;
  const uint64_t epoch = quiet.bench.kv_backend->epochs().start();
  CHECK(throws<std::logic_error>("while epoch 1", [&] { quiet.map(*quiet.one, 0, 0); }));
  quiet.bench.kv_backend->epochs().abandon(epoch);
  quiet.map(*quiet.one, 0, 0);
  quiet.finish();
}

TEST("kinds that change no mapping of the device take memory and give it beside steps") {
  for (const Kind kind : {Kind::paged, Kind::dense}) {
    Bench bench(kind, {.slowness = 20}, Bench::quiet_shape());
    const auto range = bench.kv_backend->new_range();
    const auto other = bench.kv_backend->new_range();
    range->map(bench.kv_backend->new_heap(), 0, 0, 1, true);
    const auto step = bench.step({{range.get(), 0, {}, {1}}});
    other->map(bench.kv_backend->new_heap(), 0, 0, 1, true);
    CHECK(bench.kv_backend->epochs().completed() < step.epoch);
    CHECK(other->mapped_tokens() > 0);
    bench.kv_backend->finish_mappings();
    range->unmap(0, 1);
  }
}

// --- heaps -------------------------------------------------------------------------------------

TEST("a heap is given back between two steps without a wait, and made again before it is mapped") {
  Quiet quiet;
  quiet.finish(quiet.begin());
  CHECK(throws<std::logic_error>("1 mappings of its blocks are left", [&] {
    quiet.heap->release(0, 4);
  }));
  quiet.one->unmap(0, 1);
  take_asked(quiet.bench);
  quiet.heap->release(0, 4);  // the machine reports an unmap that is still to come
  CHECK(take_asked(quiet.bench) == Asked{});
  CHECK(quiet.heap->committed_bytes() == 0);
  quiet.bench.machine.refuse("newHeapWithDescriptor:", 1);
  CHECK(throws<std::system_error>("262144 bytes", [&] {
    quiet.bench.kv_backend->commit(*quiet.heap);
  }));
  quiet.bench.kv_backend->commit(*quiet.heap);
  quiet.bench.machine.refuse("newHeapWithDescriptor:", 1);
  quiet.bench.kv_backend->commit(*quiet.heap);  // which it has
  quiet.map(*quiet.one, 0, 0);
  quiet.finish();
  quiet.bench.machine.refuse("newHeapWithDescriptor:", 0);
  quiet.bench.step({{quiet.one.get(), 0, {}, {1}}});
}

TEST("a heap of which the bundle is to map something is not released") {
  Quiet quiet;
  quiet.map(*quiet.one, 0, 0);
  CHECK(throws<std::logic_error>("1 mappings of its blocks are left", [&] {
    quiet.heap->release(0, 4);
  }));
  quiet.finish();
}

TEST("memory for a heap is made while steps run, for the sets that the next step closes") {
  Quiet quiet({.slowness = 20});
  const auto heap = quiet.bench.kv_backend->new_heap();
  heap->release(0, 4);
  const auto step = quiet.begin();
  quiet.bench.kv_backend->commit(*heap);  // the machine reports a set that changes
  CHECK(quiet.bench.kv_backend->epochs().completed() < step.epoch);
  quiet.finish(step);
  quiet.other->map(heap, 0, 0, 1, true);
  quiet.finish();
  quiet.bench.step({{quiet.other.get(), 0, {}, {1}}});
  CHECK(throws<std::invalid_argument>("not of this backend", [&] {
    SharedHeap foreign(quiet.bench.kv_backend->geometry());
    quiet.bench.kv_backend->commit(foreign);
  }));
}

// --- the end -----------------------------------------------------------------------------------

TEST("the end leaves out what a bundle was to map") {
  Quiet quiet;
  quiet.map(*quiet.one, 0, 0);
  quiet.finish();
  quiet.map(*quiet.one, 1, 1);
  quiet.map(*quiet.other, 2, 0);
  take_asked(quiet.bench);
  CHECK(quiet.bench.kv_backend->shutdown());
  CHECK(take_asked(quiet.bench).batches == 1);  // of the one that was there
}

}  // namespace
}  // namespace quire::metal
