#include <stdexcept>

#include "bench.h"
#include "check.h"
#include "core/metal/queues.h"

namespace quire::metal {
namespace {

using test::throws;

constexpr Kind kReleasing[] = {Kind::sparse, Kind::paged};
constexpr Kind kAll[] = {Kind::sparse, Kind::paged, Kind::dense};

// --- heaps are released when nothing can touch them --------------------------------------------

TEST("a heap of which something is mapped is not released") {
  for (const Kind kind : kAll) {
    Bench bench(kind);
    const auto heap = bench.kv_backend->new_heap();
    const auto range = bench.kv_backend->new_range();
    const auto blocks = static_cast<int64_t>(heap->geometry().blocks_per_heap());
    range->map(heap, 0, 0, 1, true);
    CHECK(throws<std::logic_error>("1 mappings of its blocks are left", [&] {
      heap->release(0, blocks);
    }));
    range->unmap(0, 1);
    heap->release(0, blocks);
    CHECK((heap->committed_bytes() == 0) == (kind != Kind::dense));
    range->map(heap, 0, 0, 1, true);  // which makes it again
    CHECK(heap->committed_bytes() == heap->geometry().heap_bytes());
  }
}

TEST("less than a heap is not released") {
  Bench bench(Kind::sparse);
  const auto heap = bench.kv_backend->new_heap();
  CHECK(!heap->releases_blocks());
  CHECK(throws<std::logic_error>("whole heaps only", [&] { heap->release(0, 1); }));
}

TEST("a heap is released only when no step is in flight, whatever the steps use") {
  for (const Kind kind : kReleasing) {
    Bench bench(kind, {.slowness = 20});
    const auto heap = bench.kv_backend->new_heap();
    const auto used = bench.kv_backend->new_heap();
    const auto range = bench.kv_backend->new_range();
    range->map(used, 0, 0, 1, true);
    const auto step = bench.step({{range.get(), 0, {}, {1}}});
    heap->release(0, 4);
    CHECK(bench.kv_backend->epochs().completed() >= step.epoch);
    CHECK(heap->committed_bytes() == 0);
  }
}

TEST("a heap is kept where steps follow each other without a pause") {
  auto shape = Bench::default_shape();
  shape.max_ranges = 2;
  shape.timeout = std::chrono::milliseconds(50);
  Bench bench(Kind::sparse, {}, shape);
  const auto heap = bench.kv_backend->new_heap();
  const auto used = bench.kv_backend->new_heap();
  const auto range = bench.kv_backend->new_range();
  range->map(used, 0, 0, 1, true);
  bench.step({{range.get(), 0, {}, {1}}});
  bench.machine.while_waiting([&] { bench.step({{range.get(), 1, {1}, {}}}); });
  heap->release(0, 4);
  bench.machine.while_waiting(nullptr);
  CHECK(heap->committed_bytes() == heap->geometry().heap_bytes());
  CHECK(bench.kv_backend->failure().empty());
}

TEST("a heap that the device does not make again is a mapping refused, with nothing changed") {
  for (const Kind kind : kReleasing) {
    Bench bench(kind);
    const auto heap = bench.kv_backend->new_heap();
    const auto range = bench.kv_backend->new_range();
    heap->release(0, 4);
    bench.machine.refuse("newHeapWithDescriptor:", 1);
    bench.machine.refuse("newBufferWithLength:options:", 1);
    CHECK(throws<std::system_error>("bytes", [&] { range->map(heap, 0, 0, 1, true); }));
    CHECK(range->mapped_tokens() == 0);
    CHECK(heap->committed_bytes() == 0);
    CHECK(throws<std::logic_error>("holds nothing", [&] { range->map(heap, 0, 0, 1, false); }));
    bench.machine.refuse("newHeapWithDescriptor:", 0);
    bench.machine.refuse("newBufferWithLength:options:", 0);
    range->map(heap, 0, 0, 1, true);
    bench.step({{range.get(), 0, {}, {1}}});
  }
}

// --- device objects stay until the end ---------------------------------------------------------

TEST("heaps and ranges that nobody holds any more stay while steps use them") {
  for (const Kind kind : kAll) {
    Bench bench(kind, {.slowness = 20});
    auto heap = bench.kv_backend->new_heap();
    auto range = bench.kv_backend->new_range();
    range->map(heap, 0, 0, 1, true);
    const auto step = bench.step({{range.get(), 0, {}, {1, 2, 3}}});
    heap.reset();
    range.reset();
    CHECK(bench.kv_backend->epochs().wait(step.epoch, std::chrono::seconds(10)));
    bench.require_no_mistakes();
  }
}

TEST("the end waits for the last step, and unmaps everything first") {
  for (const Kind kind : kAll) {
    Bench bench(kind, {.slowness = 20});
    const auto heap = bench.kv_backend->new_heap();
    const auto range = bench.kv_backend->new_range();
    range->map(heap, 0, 0, 1, true);
    const auto step = bench.step({{range.get(), 0, {}, {1}}});
    CHECK(bench.kv_backend->shutdown());
    CHECK(bench.kv_backend->epochs().completed() >= step.epoch);
    CHECK(range->mapped_tokens() == 0);
    CHECK(heap->committed_bytes() == 0);
    CHECK(bench.kv_backend->shutdown());  // once more is nothing
  }
}

TEST("the end waits for a step that uses no rows, too") {
  Bench bench(Kind::sparse, {.slowness = 20});
  const auto heap = bench.kv_backend->new_heap();
  const auto step = bench.step({});
  CHECK(bench.kv_backend->shutdown());
  CHECK(bench.kv_backend->epochs().completed() >= step.epoch);
}

TEST("after the end nothing begins") {
  for (const Kind kind : kAll) {
    Bench bench(kind);
    const auto heap = bench.kv_backend->new_heap();
    const auto range = bench.kv_backend->new_range();
    const auto blocks = static_cast<int64_t>(heap->geometry().blocks_per_heap());
    CHECK(bench.kv_backend->shutdown());
    const std::string refusal = "has been shut down";
    CHECK(throws<std::logic_error>(refusal, [&] { bench.kv_backend->new_heap(); }));
    CHECK(throws<std::logic_error>(refusal, [&] { bench.kv_backend->new_range(); }));
    CHECK(throws<std::logic_error>(refusal, [&] { range->map(heap, 0, 0, 1, true); }));
    CHECK(throws<std::logic_error>(refusal, [&] { heap->release(0, blocks); }));
    CHECK(throws<std::logic_error>(refusal, [&] { bench.step({{range.get(), 0, {}, {1}}}); }));
    CHECK(throws<std::logic_error>(refusal, [&] {
      bench.kv_backend->copy_block(*range, 0, *range, 0, 1);
    }));
  }
}

TEST("a backend that is dropped ends in the same order, before its ranges do") {
  for (const Kind kind : kAll) {
    Bench bench(kind, {.slowness = 20});
    const auto heap = bench.kv_backend->new_heap();
    const auto range = bench.kv_backend->new_range();
    range->map(heap, 0, 0, 1, true);
    bench.step({{range.get(), 0, {}, {1}}});
    bench.kv_backend.reset();
    CHECK(range->mapped_tokens() == 0);
    bench.machine.run();
    bench.require_no_mistakes();
    bench.give_up();  // the bench has nothing left to end
  }
}

// --- batches -----------------------------------------------------------------------------------

TEST("a run of blocks takes one operation per region, and no batch more than 2048") {
  auto shape = Bench::default_shape();
  const std::vector<int64_t> rows(2100, 1024);
  shape.geometry = Geometry(16384, 16, 2, 2, rows);
  shape.max_ranges = 2;
  Bench bench(Kind::sparse, {}, shape);
  const auto heap = bench.kv_backend->new_heap();
  const auto range = bench.kv_backend->new_range();
  range->map(heap, 0, 0, 2, true);  // the machine reports longer ones, and batches without a signal
  CHECK(range->mapped_tokens() == 32);
  bench.step({{range.get(), 0, {}, {1, 2}}});
  range->unmap(0, 2);
}

}  // namespace
}  // namespace quire::metal
