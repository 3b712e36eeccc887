#include <stdexcept>
#include <utility>

#include "bench.h"
#include "check.h"
#include "core/mapper.h"

namespace quire::metal {
namespace {

using test::throws;

KVBackend::Options impatient() {
  auto shape = Bench::default_shape();
  shape.max_ranges = 2;
  shape.timeout = std::chrono::milliseconds(30);
  return shape;
}

// After a failure: everything is refused, and nothing at all is released, whoever lets go of it.
void check_failed(
    Bench& bench, std::shared_ptr<AddressRange> range, std::shared_ptr<Heap> heap) {
  const std::string failure = bench.kv_backend->failure();
  CHECK(!failure.empty());
  const auto before = bench.machine.alive();
  CHECK(throws<std::runtime_error>(failure, [&] { bench.kv_backend->new_heap(); }));
  CHECK(throws<std::runtime_error>(failure, [&] { bench.kv_backend->new_range(); }));
  CHECK(throws<std::runtime_error>(failure, [&] { range->map(heap, 3, 3, 1, true); }));
  CHECK(throws<std::runtime_error>(failure, [&] { heap->release(0, 4); }));
  CHECK(throws<std::runtime_error>(failure, [&] { bench.step({{range.get(), 0, {}, {1}}}); }));
  CHECK(throws<std::runtime_error>(failure, [&] {
    bench.kv_backend->copy_block(*range, 0, *range, 0, 1);
  }));
  CHECK(!bench.kv_backend->shutdown());
  range.reset();
  heap.reset();
  bench.kv_backend.reset();
  CHECK(bench.kv_backend == nullptr);
  for (const char* kept : {"MTLHeap", "MTLBuffer", "MTLResidencySet", "MTL4CommandQueue"}) {
    CHECK_CASE(bench.machine.alive()[kept] == before.at(kept), kept);
  }
  bench.require_no_mistakes();
  bench.give_up();
}

TEST("a mapping that never completes is a failure for good, and nothing is released") {
  Bench bench(Kind::sparse, {}, impatient());
  auto heap = bench.kv_backend->new_heap();
  auto range = bench.kv_backend->new_range();
  bench.machine.freeze(true);
  const std::string words = "the GPU did not finish within 30 ms: 4 mapping operations";
  CHECK(throws<std::runtime_error>(words, [&] { range->map(heap, 0, 0, 1, true); }));
  CHECK(range->mapped_tokens() == 0);
  check_failed(bench, std::move(range), std::move(heap));
}

TEST("a bundle that never completes is a failure for good, and nothing of it counts as mapped") {
  auto shape = impatient();
  shape.maps_beside_steps = false;
  Bench bench(Kind::sparse, {}, shape);
  auto heap = bench.kv_backend->new_heap();
  const auto idle = bench.kv_backend->new_heap();
  auto range = bench.kv_backend->new_range();
  range->map(heap, 0, 0, 1, true);
  range->map(heap, 1, 1, 2, true);
  bench.machine.freeze(true);
  const std::string words = "the GPU did not finish within 30 ms: 8 mapping operations";
  CHECK(throws<std::runtime_error>(words, [&] { bench.kv_backend->finish_mappings(); }));
  CHECK(range->mapped_tokens() == 0);
  CHECK(throws<std::runtime_error>(words, [&] { idle->release(0, 4); }));
  CHECK(throws<std::runtime_error>(words, [&] { bench.kv_backend->commit(*idle); }));
  check_failed(bench, std::move(range), std::move(heap));
}

TEST("an unmap that never completes is a failure for good, and its heap stays") {
  auto shape = impatient();
  shape.maps_beside_steps = false;
  Bench bench(Kind::sparse, {}, shape);
  auto heap = bench.kv_backend->new_heap();
  auto range = bench.kv_backend->new_range();
  range->map(heap, 0, 0, 1, true);
  bench.kv_backend->finish_mappings();
  bench.machine.freeze(true);
  const std::string words = "the GPU did not finish within 30 ms: 4 mapping operations";
  CHECK(throws<std::runtime_error>(words, [&] { range->unmap(0, 1); }));
  CHECK(throws<std::runtime_error>(words, [&] { heap->release(0, 4); }));
  CHECK(heap->committed_bytes() > 0);
  check_failed(bench, std::move(range), std::move(heap));
}

TEST("an unmap under a step that never completes is a failure, and the pages stay") {
  Bench bench(Kind::sparse, {}, impatient());
  auto heap = bench.kv_backend->new_heap();
  auto range = bench.kv_backend->new_range();
  range->map(heap, 0, 0, 1, true);
  bench.machine.freeze(true);
  bench.step({{range.get(), 0, {}, {1}}});
  CHECK(throws<std::runtime_error>("epoch 1, before blocks are unmapped", [&] {
    range->unmap(0, 1);
  }));
  check_failed(bench, std::move(range), std::move(heap));
}

TEST("the end under a step that never completes releases nothing") {
  Bench bench(Kind::sparse, {}, impatient());
  auto heap = bench.kv_backend->new_heap();
  auto range = bench.kv_backend->new_range();
  range->map(heap, 0, 0, 1, true);
  bench.machine.freeze(true);
  bench.step({{range.get(), 0, {}, {1}}});
  CHECK(!bench.kv_backend->shutdown());
  CHECK(bench.kv_backend->failure().find("epoch 1, before shutting down") != std::string::npos);
  check_failed(bench, std::move(range), std::move(heap));
}

TEST("the release of a heap under a step that never completes is a failure, and the heap stays") {
  Bench bench(Kind::sparse, {}, impatient());
  auto heap = bench.kv_backend->new_heap();
  const auto idle = bench.kv_backend->new_heap();
  auto range = bench.kv_backend->new_range();
  range->map(heap, 0, 0, 1, true);
  bench.machine.freeze(true);
  bench.step({{range.get(), 0, {}, {1}}});
  CHECK(throws<std::runtime_error>("epoch 1, before a heap is released", [&] {
    idle->release(0, 4);
  }));
  CHECK(idle->committed_bytes() > 0);
  check_failed(bench, std::move(range), std::move(heap));
}

TEST("a block whose filling fails is not mapped, and the failure says why") {
  Bench bench(Kind::sparse, {}, impatient());
  auto heap = bench.kv_backend->new_heap();
  auto range = bench.kv_backend->new_range();
  bench.machine.fail_next_commands("a page fault at 0x1234");
  CHECK(throws<std::runtime_error>("zero_blocks: a page fault at 0x1234", [&] {
    range->map(heap, 0, 0, 1, true);
  }));
  CHECK(range->mapped_tokens() == 0);
  check_failed(bench, std::move(range), std::move(heap));
}

TEST("the mapper takes a device that does not answer for a failure, not for a refusal") {
  Bench bench(Kind::sparse, {}, impatient());
  auto heap = bench.kv_backend->new_heap();
  auto range = bench.kv_backend->new_range();
  bench.machine.freeze(true);
  {
    Mapper mapper;
    const uint64_t ticket = mapper.attempt([&] { range->map_committed(heap, 0, 0, 1); });
    CHECK(mapper.wait(ticket, std::chrono::seconds(30)));
    CHECK(!mapper.refused(ticket));
    CHECK(mapper.failure().find("mapping operations") != std::string::npos);
  }
  check_failed(bench, std::move(range), std::move(heap));
}

TEST("a failed step is no failure of the memory") {
  Bench bench(Kind::sparse, {}, impatient());
  auto heap = bench.kv_backend->new_heap();
  auto range = bench.kv_backend->new_range();
  range->map(heap, 0, 0, 1, true);
  bench.machine.fail_next_commands("too slow");
  const auto step = bench.step({{range.get(), 0, {}, {1}}});
  bench.machine.run();
  CHECK(step.commands->status() == MTL::CommandBufferStatusError);
  CHECK(bench.kv_backend->epochs().completed() == 0);
  bench.kv_backend->epochs().abandon(step.epoch);
  range->unmap(0, 1);
  range->map(heap, 0, 0, 1, true);
  CHECK(bench.kv_backend->failure().empty());
}

}  // namespace
}  // namespace quire::metal

// What a backend keeps for good because the device did not answer is no leak.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:quire::metal::KVBackend::~KVBackend\n";
}
