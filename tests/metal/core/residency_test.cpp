#include <functional>
#include <stdexcept>
#include <thread>

#include "bench.h"
#include "check.h"

namespace quire::metal {
namespace {

using test::throws;
using namespace std::chrono_literals;

constexpr Kind kAll[] = {Kind::sparse, Kind::paged, Kind::dense};
constexpr uint64_t kHeap = 256 << 10;
// A set holds two heaps of such a machine.
const fake::Options kTwoHeapsPerSet = {.slowness = 20, .working_set_bytes = 20 * 2 * kHeap};

size_t sets(const Bench& bench) {
  return bench.machine.alive()["MTLResidencySet"];
}

uint64_t requests(Bench& bench) {
  const std::lock_guard lock(bench.machine.mutex);
  return bench.machine.residency_requests;
}

void finish(Bench& bench, const Bench::Step& step) {
  CHECK(bench.kv_backend->epochs().wait(step.epoch, 10s));
}

// A range with one block of a heap of its own, of which a step may use the first row.
std::shared_ptr<AddressRange> new_rows(Bench& bench) {
  const auto range = bench.kv_backend->new_range();
  range->map(bench.kv_backend->new_heap(), 0, 0, 1, true);
  return range;
}

NS::SharedPtr<MTL::Buffer> new_weights(Bench& bench, uint64_t bytes) {
  return NS::TransferPtr(bench.device->newBuffer(bytes, MTL::ResourceStorageModeShared));
}

// A command such as MLX's own, which nobody prepares for.
void read(Bench& bench, uint64_t address) {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto* const commands = bench.queue->commandBufferWithUnretainedReferences();
  fake::encode(commands, "a command of MLX's", {{address, 16, false}}, [] {});
  commands->commit();
  commands->waitUntilCompleted();
}

KVBackend::Options shape_with(Residency::Options residency) {
  auto shape = Bench::default_shape();
  shape.max_ranges = 2;
  shape.residency = residency;
  return shape;
}

// --- which memory is in which set ---------------------------------------------------------------

TEST("memory that is made between two steps shares a set, and a step closes it") {
  Bench bench(Kind::sparse, {.slowness = 20});
  const auto first = new_rows(bench);
  const auto second = new_rows(bench);
  CHECK(sets(bench) == 1);
  const auto step = bench.step({{first.get(), 0, {}, {1}}, {second.get(), 0, {}, {2}}});
  const auto third = new_rows(bench);  // the machine reports a set that changes under the step
  const auto fourth = new_rows(bench);
  CHECK(bench.kv_backend->epochs().completed() < step.epoch || sets(bench) == 2);
  bench.step({{first.get(), 1, {1}, {3}}, {third.get(), 0, {}, {4}}, {fourth.get(), 0, {}, {5}}});
  new_rows(bench);
  CHECK(sets(bench) == 3);
}

TEST("a set holds five percent of the working set, but one heap at least") {
  for (const uint64_t working_set : {20 * 2 * kHeap, 20 * kHeap / 2}) {
    Bench bench(Kind::sparse, {.working_set_bytes = working_set});
    std::vector<std::shared_ptr<Heap>> heaps;
    for (int i = 0; i < 5; ++i) {
      heaps.push_back(bench.kv_backend->new_heap());
    }
    const auto range = bench.kv_backend->new_range();
    range->map(heaps[4], 0, 0, 1, true);
    CHECK(sets(bench) == (working_set > 20 * kHeap ? 3 : 5));
    bench.step({{range.get(), 0, {}, {1}}});
  }
}

TEST("there are never more than 24 sets, whatever is made while steps run") {
  for (const Kind kind : {Kind::sparse, Kind::paged}) {
    for (const uint64_t working_set : {uint64_t{1} << 33, 20 * 2 * kHeap}) {
      Bench bench(kind, {.slowness = 20, .working_set_bytes = working_set});
      std::vector<std::shared_ptr<AddressRange>> ranges;
      size_t most = 0;
      for (uint64_t i = 0; i < 60; ++i) {
        ranges.push_back(new_rows(bench));
        most = std::max(most, sets(bench));
        bench.step({{ranges.back().get(), 0, {}, {i}}, {ranges[0].get(), 1, {0}, {}}});
      }
      CHECK_CASE(most == Residency::kMostSets, std::to_string(most));
      bench.require_no_mistakes();
    }
  }
}

TEST("one set more than there may be is refused where steps follow each other without a pause") {
  auto shape = shape_with({.most_sets = 1});
  shape.timeout = 50ms;
  Bench bench(Kind::sparse, {}, shape);
  const auto used = new_rows(bench);
  const auto heap = bench.kv_backend->new_heap();
  const auto range = bench.kv_backend->new_range();
  bench.step({{used.get(), 0, {}, {1}}});
  bench.machine.while_waiting([&] { bench.step({{used.get(), 1, {1}, {}}}); });
  CHECK(throws<std::system_error>("always a step in flight", [&] {
    range->map(heap, 0, 0, 1, true);
  }));
  bench.machine.while_waiting(nullptr);
  CHECK(range->mapped_tokens() == 0 && bench.kv_backend->failure().empty());
  range->map(heap, 0, 0, 1, true);
  CHECK(sets(bench) == 1);
  bench.step({{range.get(), 0, {}, {1}}, {used.get(), 1, {1}, {}}});
}

TEST("a set that the device refuses is a mapping refused, with nothing changed") {
  for (const Kind kind : kAll) {
    Bench bench(kind);
    const auto heap = bench.kv_backend->new_heap();
    const auto range = bench.kv_backend->new_range();
    bench.machine.refuse("newResidencySetWithDescriptor:error:", 1);
    CHECK(throws<std::system_error>("no residency set", [&] { range->map(heap, 0, 0, 1, true); }));
    CHECK(range->mapped_tokens() == 0);
    range->map(heap, 0, 0, 1, true);
    bench.step({{range.get(), 0, {}, {1}}});
  }
}

TEST("with a heap that is released its whole set goes, and comes back without it") {
  Bench bench(Kind::sparse, kTwoHeapsPerSet);
  const auto used = new_rows(bench);
  const auto other = bench.kv_backend->new_heap();
  const auto range = bench.kv_backend->new_range();
  range->map(other, 0, 0, 1, true);
  bench.step({{used.get(), 0, {}, {1}}, {range.get(), 0, {}, {2}}});
  range->unmap(0, 1);
  bench.machine.refuse("newResidencySetWithDescriptor:error:", 1);  // it does without a new one
  other->release(0, 4);
  CHECK(other->committed_bytes() == 0 && sets(bench) == 1);
  bench.step({{used.get(), 1, {1}, {}}});
  bench.machine.refuse("newResidencySetWithDescriptor:error:", 0);
  range->map(other, 0, 0, 1, true);
  bench.step({{used.get(), 1, {1}, {}}, {range.get(), 0, {}, {2}}});
}

TEST("weights are in sets of their own from the start, and stay there") {
  Bench bench(Kind::sparse, kTwoHeapsPerSet);
  std::vector<NS::SharedPtr<MTL::Buffer>> weights;
  std::vector<uint64_t> addresses;
  for (uint64_t i = 0; i < 8; ++i) {  // of a quarter to two heaps: 9 heaps in all
    weights.push_back(new_weights(bench, kHeap / 4 * (1 + i)));
    addresses.push_back(weights.back()->gpuAddress());
  }
  bench.kv_backend->residency().hold(std::move(weights));
  const size_t held = sets(bench);
  CHECK(5 <= held && held <= 7);
  CHECK(throws<std::logic_error>("resident already", [&] {
    bench.kv_backend->residency().hold({new_weights(bench, 1)});
  }));
  std::vector<std::shared_ptr<AddressRange>> ranges;
  for (uint64_t i = 0; i < 40; ++i) {
    ranges.push_back(new_rows(bench));
    bench.step({{ranges.back().get(), 0, {}, {i}}});
    for (const uint64_t address : addresses) {
      read(bench, address);
    }
  }
  CHECK(sets(bench) <= Residency::kMostSets);
}

TEST("weights leave room for the sets of heaps, however large they are") {
  Bench bench(Kind::sparse, kTwoHeapsPerSet);
  std::vector<NS::SharedPtr<MTL::Buffer>> weights;
  for (int i = 0; i < 60; ++i) {
    weights.push_back(new_weights(bench, 2 * kHeap));
  }
  bench.kv_backend->residency().hold(std::move(weights));
  CHECK(sets(bench) == Residency::kMostSets - Residency::kLeftByWeights);
  for (uint64_t i = 0; i < 10; ++i) {
    bench.step({{new_rows(bench).get(), 0, {}, {i}}});
  }
  CHECK(sets(bench) <= Residency::kMostSets);
}

// --- when sets are asked for --------------------------------------------------------------------

TEST("after a pause the sets are asked for before the first commit, and not between steps") {
  for (const Kind kind : kAll) {
    Bench bench(kind);
    const auto range = new_rows(bench);
    finish(bench, bench.step({{range.get(), 0, {}, {1}}}));
    const uint64_t before = requests(bench);
    for (int i = 0; i < 5; ++i) {
      bench.machine.pass(400ms);
      finish(bench, bench.step({{range.get(), 1, {1}, {}}}));
    }
    CHECK(requests(bench) == before);
    bench.machine.pass(1100ms);
    finish(bench, bench.step({{range.get(), 1, {1}, {}}}));  // the machine reports one that is late
    CHECK(requests(bench) == before + sets(bench));
  }
}

TEST("after a pause the sets are asked for before new memory is filled, and before a copy") {
  for (const Kind kind : {Kind::sparse, Kind::paged}) {
    Bench bench(kind);
    const auto heap = bench.kv_backend->new_heap();
    const auto range = bench.kv_backend->new_range();
    range->map(heap, 0, 0, 1, true);
    finish(bench, bench.step({{range.get(), 0, {}, {1}}}));
    bench.machine.pass(2s);
    range->map(heap, 1, 1, 1, true);
    bench.machine.pass(2s);
    bench.kv_backend->copy_block(*range, 0, *range, 1, 1);
    bench.machine.pass(2s);
    range->unmap(0, 2);
  }
}

TEST("of all sets, only the one that new memory came into is asked for while steps run") {
  Bench bench(Kind::sparse, kTwoHeapsPerSet);
  std::vector<std::shared_ptr<AddressRange>> ranges;
  for (uint64_t i = 0; i < 8; ++i) {
    const uint64_t before = requests(bench);
    ranges.push_back(new_rows(bench));
    CHECK(requests(bench) == before + 1);
    bench.step({{ranges.back().get(), 0, {}, {i}}});
    CHECK(requests(bench) == before + 1);
  }
  CHECK(sets(bench) == 8);
}

// Whether there comes a request within ten seconds.
bool asks(Bench& bench) {
  const uint64_t before = requests(bench);
  for (int i = 0; i < 1000 && requests(bench) == before; ++i) {
    std::this_thread::sleep_for(10ms);
  }
  return requests(bench) > before;
}

// Whether there comes a time in which there is none.
bool falls_silent(Bench& bench) {
  for (int i = 0; i < 10; ++i) {
    const uint64_t before = requests(bench);
    std::this_thread::sleep_for(300ms);
    if (requests(bench) == before) {
      return true;
    }
  }
  return false;
}

TEST("between steps and for a while after, threads of their own ask for the sets again") {
  Bench bench(Kind::sparse, {}, shape_with({.keep = 10s, .interval = 5ms}));
  const auto range = new_rows(bench);
  const auto address = reinterpret_cast<uint64_t>(range->region(0));
  finish(bench, bench.step({{range.get(), 0, {}, {1}}}));
  for (int i = 0; i < 3; ++i) {
    CHECK(asks(bench));
    bench.machine.pass(900ms);
  }
  CHECK(asks(bench));
  read(bench, address);
  bench.machine.pass(10s);
  CHECK(falls_silent(bench));
  finish(bench, bench.step({{range.get(), 1, {1}, {}}}));  // which wakes it
  CHECK(asks(bench));
}

TEST("a device that has failed is asked for nothing") {
  fake::Machine machine;
  const auto device = fake::new_device();
  Health health(1s);
  const auto buffer = NS::TransferPtr(device->newBuffer(16, MTL::ResourceStorageModeShared));
  Residency residency(device.get(), health, {.supported = true, .keep = 10s, .interval = 5ms});
  residency.hold({buffer});
  const uint64_t before = machine.residency_requests;
  CHECK(throws<std::runtime_error>("too hot", [&] { health.fail("too hot"); }));
  std::this_thread::sleep_for(300ms);
  CHECK(machine.residency_requests == before);
  residency.end();
}

TEST("where there are no residency sets, none is asked for") {
  Bench bench(Kind::paged, {.lacks = {"MTLDevice newResidencySetWithDescriptor:error:"}},
              [] {
                auto shape = Bench::default_shape();
                shape.kind = Kind::paged;
                shape.max_ranges = 2;
                shape.residency.keep = 10s;
                return shape;
              }());
  bench.kv_backend->residency().hold({new_weights(bench, 16)});
  const auto range = new_rows(bench);
  bench.machine.pass(2s);
  bench.step({{range.get(), 0, {}, {1}}});
  CHECK(requests(bench) == 0 && bench.kv_backend->residency().unattached().size() == 1);
}

}  // namespace
}  // namespace quire::metal
