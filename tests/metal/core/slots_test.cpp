#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <set>
#include <stdexcept>

#include "bench.h"
#include "check.h"

namespace quire::metal {
namespace {

using test::throws;

constexpr Kind kAll[] = {Kind::sparse, Kind::paged, Kind::dense};
constexpr size_t kSlot = 64 << 10;
constexpr size_t kSlots = 6;
constexpr size_t kTwoSlots = 20 * 2 * kSlot;  // a working set of which two slots are 5 %

// What a slot has seen: a word that every step of its sequence changes.
uint64_t& word(uint64_t address) { return *reinterpret_cast<uint64_t*>(address); }

// A bench with slots, and one sequence whose rows give steps something to do.
class States {
 public:
  // The first `committed` slots have memory.
  explicit States(Kind kind, fake::Options options = {.slowness = 20}, size_t committed = kSlots)
      : bench(kind, std::move(options)), range_(bench.kv_backend->new_range()) {
    range_->map(bench.kv_backend->new_heap(), 0, 0, 1, true);
    bench.kv_backend->make_slots(kSlots, kSlot);
    for (size_t slot = 0; slot < committed; ++slot) {
      bench.kv_backend->commit_slot(slot);
    }
  }

  Slots& slots() { return *bench.kv_backend->slots(); }

  uint64_t address(size_t slot) {
    MTL::Buffer* const arena = slots().arena();
    return (arena == nullptr ? 0 : arena->gpuAddress()) + slots().place(slot);
  }

  // A step of segments, as the engine makes it: rows, slots, commands, the epoch's signal. In each
  // segment the state is what was read, or zero, plus one for each row.
  Bench::Step step(const std::vector<SlotSegment>& segments) {
    const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
    KVBackend& metal = *bench.kv_backend;
    const uint64_t epoch = metal.epochs().start();
    try {
      metal.own(*range_).use(epoch, 0, 1);
      slots().use(epoch, segments);
    } catch (const std::exception&) {
      metal.epochs().abandon(epoch);
      throw;
    }
    metal.residency().attach(bench.queue.get());
    std::vector<MTL::Resource*> used = metal.residency().unattached();
    if (slots().arena() != nullptr) {
      used.push_back(slots().arena());
    }
    auto commands = NS::RetainPtr(bench.queue->commandBufferWithUnretainedReferences());
    for (const SlotSegment& segment : segments) {
      std::vector<fake::Access> accesses;
      const uint64_t read = segment.read ? address(*segment.read) : 0;
      if (segment.read) {
        accesses.push_back({read, kSlot, false});
      }
      std::vector<std::pair<size_t, uint64_t>> writes;
      for (const auto& write : segment.writes) {
        writes.emplace_back(write.rows, address(write.slot));
        accesses.push_back({writes.back().second, kSlot, true});
      }
      fake::encode(commands.get(), "a step", accesses, [read, writes] {
        const uint64_t begun = read == 0 ? 0 : word(read);
        for (const auto& [rows, at] : writes) {
          word(at) = begun + rows;
        }
      }, used);
    }
    commands->encodeSignalEvent(metal.epochs().event(), epoch);
    commands->commit();
    return {epoch, commands};
  }

  void finish(const Bench::Step& step) {
    CHECK(bench.kv_backend->epochs().wait(step.epoch, std::chrono::seconds(10)));
  }

  Bench bench;

 private:
  std::shared_ptr<AddressRange> range_;
};

TEST("a state goes from slot to slot, and its slots stay where they are") {
  for (const Kind kind : kAll) {
    States states(kind);
    std::set<uint64_t> places;
    for (size_t slot = 0; slot < kSlots; ++slot) {
      places.insert(states.address(slot));
    }
    CHECK(places.size() == kSlots);
    for (auto place = places.begin(); std::next(place) != places.end(); ++place) {
      CHECK(*std::next(place) - *place >= kSlot);
    }
    states.step({{5, {}, {{3, 0}, {5, 1}}}});
    states.step({{1, 1, {{1, 1}}}});  // in place, behind the step that is in flight
    states.finish(states.step({{2, 1, {{2, 1}}}, {4, 0, {{4, 2}}}}));
    CHECK(word(states.address(0)) == 3);
    CHECK(word(states.address(1)) == 8);
    CHECK(word(states.address(2)) == 7);
  }
}

TEST("slots are resident before the first step, without a mapping") {
  for (const Kind kind : kAll) {
    States states(kind, {.slowness = 20, .working_set_bytes = kTwoSlots});
    states.finish(states.step({{1, {}, {{1, 0}}}, {1, {}, {{1, kSlots - 1}}}}));
    states.bench.require_no_mistakes();
  }
}

TEST("a buffer of slots is made for its first slot, and is no longer than a residency set") {
  for (const Kind kind : kAll) {
    const size_t per_buffer = kind == Kind::dense ? kSlots : 2;
    Bench bench(kind, {.working_set_bytes = kTwoSlots});
    const auto before = bench.machine.alive()["MTLBuffer"];
    bench.kv_backend->make_slots(kSlots, kSlot);
    std::set<size_t> buffers;
    for (const size_t slot : {0u, 1u, 0u, 4u, 5u, 2u, 3u}) {
      CHECK(bench.machine.alive()["MTLBuffer"] - before == buffers.size());
      buffers.insert(slot / per_buffer);
      CHECK(bench.kv_backend->commit_slot(slot) == buffers.size() * per_buffer * kSlot);
    }
  }
}

TEST("a slot may get its memory while a step runs, although the device refused it once") {
  for (const Kind kind : kAll) {
    for (const char* selector :
         {"newBufferWithLength:options:", "newResidencySetWithDescriptor:error:"}) {
      States states(kind, {.slowness = 60, .working_set_bytes = kTwoSlots}, 2);
      states.step({{1, {}, {{1, 0}}}});
      const auto commit = [&] { states.bench.kv_backend->commit_slot(kSlots - 1); };
      if (kind != Kind::dense) {  // which has all slots in one buffer
        states.bench.machine.refuse(selector, 1);
        CHECK_CASE(throws<std::system_error>("", commit), selector);
      }
      commit();
      states.step({{1, 0, {{1, 0}}}, {1, {}, {{1, kSlots - 1}}}});
      states.finish(states.step({{1, kSlots - 1, {{1, kSlots - 1}}}}));
      CHECK(word(states.address(kSlots - 1)) == 2);
      states.bench.require_no_mistakes();
    }
  }
}

TEST("where there are no residency sets, encoders are told of slots") {
  States states(Kind::paged, {.lacks = {"MTLDevice newResidencySetWithDescriptor:error:"}});
  CHECK(states.bench.kv_backend->residency().unattached().size() == 2);
  states.finish(states.step({{1, {}, {{1, 0}}}}));
}

TEST("a slot is written anew when every step that may touch it has completed") {
  for (const Kind kind : kAll) {
    States states(kind);
    states.finish(states.step({{1, {}, {{1, 0}}}}));
    const auto reading = states.step({{1, 0, {{1, 1}}}});
    const auto touched = [&](const char* what, const SlotSegment& segment) {
      if (states.bench.kv_backend->epochs().completed() < reading.epoch) {
        CHECK(throws<std::logic_error>(what, [&] { states.step({segment}); }));
      }
    };
    touched("slot 0 is written by epoch 3, while epoch 2 may touch it", {1, {}, {{1, 0}}});
    touched("slot 1 is written by epoch 4, while epoch 2 may touch it", {1, 0, {{1, 1}}});
    touched("slot 0 is written by epoch 5, while epoch 2 may touch it", {1, 0, {{1, 0}}});
    states.finish(reading);
    states.finish(states.step({{1, {}, {{1, 0}}}}));
    CHECK(word(states.address(0)) == 1);
    CHECK(word(states.address(1)) == 2);
  }
}

TEST("the end waits for the steps that use slots") {
  for (const Kind kind : kAll) {
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      States states(kind, {.seed = seed, .slowness = 60});
      states.step({{1, {}, {{1, 0}}}});
      states.step({{1, 0, {{1, 0}}}});  // and nobody waits for it
    }
  }
}

TEST("a step that fails counts as complete for its slots, too") {
  States states(Kind::sparse);
  KVBackend& metal = *states.bench.kv_backend;
  const uint64_t epoch = metal.epochs().start();
  states.slots().use(epoch, {{1, {}, {{1, 3}}}});
  metal.epochs().abandon(epoch);
  states.finish(states.step({{1, {}, {{1, 3}}}}));
  CHECK(word(states.address(3)) == 1);
}

TEST("what no step may do with slots is refused, and changes nothing") {
  States states(Kind::sparse, {.slowness = 20, .working_set_bytes = kTwoSlots}, 4);
  const auto refused = [&](const char* what, const std::vector<SlotSegment>& segments) {
    CHECK_CASE(throws<std::logic_error>(what, [&] { states.step(segments); }), what);
  };
  states.finish(states.step({{1, {}, {{1, 0}}}}));
  refused("slot 1 is read by epoch 2, and nothing has written it", {{1, 1, {{1, 2}}}});
  refused("slot 2 is written twice", {{1, {}, {{1, 2}}}, {1, 0, {{1, 2}}}});
  refused("slot 2 is written twice", {{2, {}, {{1, 2}, {2, 2}}}});
  refused("slot 0 is written by epoch 5, in which others read it",
          {{1, 0, {{1, 0}}}, {1, 0, {{1, 2}}}});
  refused("slot 0 is written by epoch 6, in which others read it",
          {{1, {}, {{1, 0}}}, {1, 0, {{1, 2}}}});
  refused("slot 6 of 6", {{1, 6, {{1, 0}}}});
  refused("slot 7 of 6", {{1, {}, {{1, 7}}}});
  refused("a segment needs a write", {{2, {}, {}}});
  refused("ascend within its 2 rows", {{2, {}, {{2, 1}, {1, 2}}}});
  refused("ascend within its 2 rows", {{2, {}, {{3, 1}}}});
  refused("nothing has written it", {{1, 2, {{1, 3}}}});
  refused("slot 4 has no memory", {{1, {}, {{1, 4}}}});
  refused("slot 5 has no memory", {{1, 5, {{1, 0}}}});
}

TEST("slots are made once, as the device can have them") {
  for (const Kind kind : kAll) {
    auto shape = Bench::default_shape();
    shape.kind = kind;
    shape.geometry = small_geometry(kind);
    shape.max_ranges = 2;
    shape.max_buffer_bytes = 2 * shape.geometry.range_bytes();
    const size_t most = shape.max_buffer_bytes / kSlot;
    Bench bench(kind, {}, shape);
    KVBackend& metal = *bench.kv_backend;
    CHECK(metal.slots() == nullptr);
    CHECK(throws<std::logic_error>("has no slots", [&] { metal.commit_slot(0); }));
    CHECK(throws<std::invalid_argument>("24 bytes; it must be a multiple of 16", [&] {
      metal.make_slots(1, 24);
    }));
    CHECK(throws<std::runtime_error>("fewer sequences are needed", [&] {
      metal.make_slots(1, shape.max_buffer_bytes + 16);
    }));
    const auto many = [&] { metal.make_slots(most + 1, kSlot); };
    if (kind == Kind::dense) {
      CHECK(throws<std::runtime_error>("lie in one buffer, but a buffer has", many));
      metal.make_slots(most, kSlot);
    } else {
      many();
    }
    CHECK(throws<std::logic_error>("has slots already", [&] { metal.make_slots(1, kSlot); }));
    CHECK(throws<std::out_of_range>("slot", [&] { metal.commit_slot(2 * most); }));
  }
}

// --- slots in files -----------------------------------------------------------------------------

TEST("a slot comes back from a file, in another slot, from which a sequence goes on") {
  for (const Kind kind : kAll) {
    States states(kind, {.slowness = 20}, 2);
    const int fd = memfd_create("slots", 0);
    KVBackend& metal = *states.bench.kv_backend;
    states.finish(states.step({{3, {}, {{3, 0}}}}));
    const uint32_t sum = metal.move_slot(Direction::to_file, 0, fd, 4096);
    CHECK(throws<std::logic_error>("slot 1 is read by epoch 2, and nothing has written it", [&] {
      states.step({{1, 1, {{1, 0}}}});
    }));
    CHECK(metal.move_slot(Direction::from_file, 1, fd, 4096) == sum);
    CHECK(metal.move_slot(Direction::to_file, 1, fd, 0) == sum);
    states.finish(states.step({{4, 1, {{4, 0}}}}));
    CHECK(word(states.address(0)) == 7 && word(states.address(1)) == 3);
    if (kind != Kind::dense) {  // where all slots lie in one buffer
      states.bench.kv_backend->commit_slot(kSlots - 1);
    }
    CHECK(throws<std::out_of_range>("slot 6 of 6", [&] {
      metal.move_slot(Direction::to_file, kSlots, fd, 0);
    }));
    close(fd);
  }
}

}  // namespace
}  // namespace quire::metal
