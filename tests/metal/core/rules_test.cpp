#include <stdexcept>

#include "bench.h"
#include "check.h"

namespace quire::metal {
namespace {

using test::throws;

// The kinds that share blocks, and all of them.
constexpr Kind kSharing[] = {Kind::sparse, Kind::paged};
constexpr Kind kAll[] = {Kind::sparse, Kind::paged, Kind::dense};

std::vector<uint64_t> stamps(uint64_t first, size_t count) {
  std::vector<uint64_t> all(count);
  for (size_t i = 0; i < count; ++i) {
    all[i] = first + i;
  }
  return all;
}

// A range with its first block mapped, and full of rows that a step wrote.
struct Full {
  std::shared_ptr<Heap> heap;
  std::shared_ptr<AddressRange> range;
  std::vector<uint64_t> rows;
  Bench::Step step;
};

Full full_block(Bench& bench) {
  const size_t tokens = bench.kv_backend->geometry().tokens_per_block();
  Full full{bench.kv_backend->new_heap(), bench.kv_backend->new_range(), stamps(100, tokens), {}};
  full.range->map(full.heap, 0, 0, 1, true);
  full.step = bench.step({{full.range.get(), 0, {}, full.rows}});
  return full;
}

bool completed(Bench& bench, const Bench::Step& step) {
  return bench.kv_backend->epochs().completed() >= step.epoch;
}

void finish(Bench& bench, const Bench::Step& step) {
  CHECK(bench.kv_backend->epochs().wait(step.epoch, std::chrono::seconds(10)));
}

// --- rows need a mapping that was observed -----------------------------------------------------

TEST("a step cannot use rows that have no memory") {
  for (const Kind kind : kAll) {
    Bench bench(kind);
    const auto range = bench.kv_backend->new_range();
    const auto heap = bench.kv_backend->new_heap();
    const size_t tokens = bench.kv_backend->geometry().tokens_per_block();
    const std::string refusal = "a step cannot use tokens up to 1: 0 are mapped";
    CHECK(throws<std::logic_error>(refusal, [&] { bench.step({{range.get(), 0, {}, {1}}}); }));
    range->map(heap, 0, 0, 1, true);
    bench.step({{range.get(), 0, {}, stamps(1, tokens)}});
    CHECK(throws<std::logic_error>("are mapped", [&] {
      bench.step({{range.get(), tokens, stamps(1, tokens), {1}}});
    }));
  }
}

TEST("a step uses rows in its own epoch, while that is in flight") {
  Bench bench(Kind::sparse);
  const Full full = full_block(bench);
  AddressRange& range = *full.range;
  finish(bench, full.step);
  CHECK(throws<std::logic_error>("epoch 1 is not in flight", [&] {
    bench.kv_backend->own(range).use(full.step.epoch, 0, 1);
  }));
  CHECK(throws<std::logic_error>("epoch 2 is not in flight", [&] {
    bench.kv_backend->own(range).use(full.step.epoch + 1, 0, 1);
  }));
}

// --- nothing is unmapped, or given to another, under a step ------------------------------------

TEST("an unmap waits for the last step that uses the range") {
  for (const Kind kind : kAll) {
    Bench bench(kind, {.slowness = 20});
    const Full full = full_block(bench);
    CHECK(!completed(bench, full.step));
    full.range->unmap(0, 1);
    CHECK(completed(bench, full.step));
  }
}

TEST("an unmap waits for steps that only read the range") {
  for (const Kind kind : kAll) {
    Bench bench(kind, {.slowness = 20});
    const Full full = full_block(bench);
    finish(bench, full.step);
    const auto reader = bench.step({{full.range.get(), full.rows.size(), full.rows, {}}});
    CHECK(!completed(bench, reader));
    full.range->unmap(0, 1);
    CHECK(completed(bench, reader));
  }
}

TEST("a block that something maps gets no writable mapping") {
  for (const Kind kind : kSharing) {
    Bench bench(kind);
    const Full full = full_block(bench);
    const auto other = bench.kv_backend->new_range();
    const std::string refusal = "heap block 0 is mapped already";
    CHECK(throws<std::logic_error>(refusal, [&] { other->map(full.heap, 0, 0, 1, true); }));
    finish(bench, full.step);
    other->map(full.heap, 0, 0, 1, false);
    full.range->unmap(0, 1);
    CHECK(throws<std::logic_error>(refusal, [&] { full.range->map(full.heap, 0, 0, 1, true); }));
    other->unmap(0, 1);
    full.range->map(full.heap, 0, 0, 1, true);
  }
}

// --- only sealed blocks are shared -------------------------------------------------------------

TEST("a block is shared only when the step that writes it has completed") {
  for (const Kind kind : kSharing) {
    Bench bench(kind, {.slowness = 20});
    const Full full = full_block(bench);
    const auto other = bench.kv_backend->new_range();
    CHECK(throws<std::logic_error>("epoch 1, which writes it, is not complete", [&] {
      other->map(full.heap, 0, 0, 1, false);
    }));
    CHECK(other->mapped_tokens() == 0);
    finish(bench, full.step);
    other->map(full.heap, 0, 0, 1, false);
    bench.step({{other.get(), full.rows.size(), full.rows, {}}});
  }
}

TEST("a shared block is never written again, by its writer or by a copy") {
  for (const Kind kind : kSharing) {
    Bench bench(kind);
    const auto heap = bench.kv_backend->new_heap();
    const auto writer = bench.kv_backend->new_range();
    const auto reader = bench.kv_backend->new_range();
    writer->map(heap, 0, 0, 2, true);
    finish(bench, bench.step({{writer.get(), 0, {}, stamps(1, 3)}}));
    reader->map(heap, 0, 0, 1, false);
    const std::string refusal = "heap block 0 is sealed";
    CHECK(throws<std::logic_error>(refusal, [&] {
      bench.step({{writer.get(), 3, stamps(1, 3), {4}}});
    }));
    CHECK(throws<std::logic_error>(refusal, [&] {
      bench.step({{reader.get(), 3, stamps(1, 3), {4}}});
    }));
    CHECK(throws<std::logic_error>(refusal, [&] {
      bench.kv_backend->copy_block(*writer, 1, *writer, 0, 1);
    }));
    reader->unmap(0, 1);  // and it stays so while the content is kept
    CHECK(throws<std::logic_error>(refusal, [&] {
      bench.step({{writer.get(), 3, stamps(1, 3), {4}}});
    }));
  }
}

TEST("a block outlives its writer, for whoever shares it next") {
  for (const Kind kind : kSharing) {
    Bench bench(kind);
    const Full full = full_block(bench);
    full.range->unmap(0, 1);
    const auto other = bench.kv_backend->new_range();
    other->map(full.heap, 0, 0, 1, false);
    bench.step({{other.get(), full.rows.size(), full.rows, {}}});
  }
}

TEST("a block that nobody has written since its heap was made cannot be shared") {
  for (const Kind kind : kSharing) {
    Bench bench(kind);
    const std::string refusal = "heap block 0 holds nothing that could be shared";
    const Full full = full_block(bench);
    const auto fresh = bench.kv_backend->new_heap();
    const auto other = bench.kv_backend->new_range();
    CHECK(throws<std::logic_error>(refusal, [&] { other->map(fresh, 0, 0, 1, false); }));
    full.range->unmap(0, 1);
    full.heap->release(0, 4);
    CHECK(throws<std::logic_error>(refusal, [&] { other->map(full.heap, 0, 0, 1, false); }));
  }
}

TEST("dense ranges share nothing") {
  Bench bench(Kind::dense);
  const auto range = bench.kv_backend->new_range();
  const auto heap = bench.kv_backend->new_heap();
  CHECK(throws<std::invalid_argument>("shares nothing", [&] { range->map(heap, 0, 0, 1, false); }));
}

// --- what is visible is zero at first ----------------------------------------------------------

TEST("a new owner of a block finds zeros, whoever had it before") {
  for (const Kind kind : kAll) {
    Bench bench(kind);
    const size_t tokens = bench.kv_backend->geometry().tokens_per_block();
    const Full full = full_block(bench);
    for (int round = 0; round < 2; ++round) {
      full.range->unmap(0, 1);
      full.range->map(full.heap, 0, 0, 1, true);
      std::vector<std::string> mistakes;
      const RowPlaces places(bench.metal(), *full.range, tokens);
      check_rows(places, bench.kv_backend->geometry(), {}, tokens, mistakes);
      CHECK_CASE(mistakes.empty(), mistakes.front());
      finish(bench, bench.step({{full.range.get(), 0, {}, full.rows}}));
    }
  }
}

// --- a copied block ----------------------------------------------------------------------------

TEST("a copy waits for the step that writes the source, and takes those rows alone") {
  for (const Kind kind : kAll) {
    Bench bench(kind, {.slowness = 20});
    const size_t tokens = bench.kv_backend->geometry().tokens_per_block();
    const Full full = full_block(bench);
    const auto target = bench.kv_backend->new_range();
    const auto other_heap = bench.kv_backend->new_heap();
    target->map(other_heap, 0, 0, 1, true);
    const auto next = bench.step({{full.range.get(), tokens, full.rows, {}}});
    bench.kv_backend->copy_block(*full.range, 0, *target, 0, 5);
    CHECK(completed(bench, full.step));
    std::vector<std::string> mistakes;
    check_rows(RowPlaces(bench.metal(), *target, tokens), bench.kv_backend->geometry(),
               stamps(100, 5), tokens, mistakes);
    CHECK_CASE(mistakes.empty(), mistakes.front());
    finish(bench, next);
  }
}

TEST("what cannot be copied is refused before anything is touched") {
  Bench bench(Kind::sparse);
  const Full full = full_block(bench);
  const auto empty = bench.kv_backend->new_range();
  const auto copy = [&](AddressRange& source, AddressRange& target, size_t tokens) {
    bench.kv_backend->copy_block(source, 0, target, 0, tokens);
  };
  CHECK(throws<std::logic_error>("without memory", [&] { copy(*full.range, *empty, 1); }));
  CHECK(throws<std::logic_error>("without memory", [&] { copy(*empty, *full.range, 1); }));
  CHECK(throws<std::logic_error>("17 tokens", [&] { copy(*full.range, *full.range, 17); }));
  CHECK(throws<std::logic_error>("0 tokens", [&] { copy(*full.range, *full.range, 0); }));
}

}  // namespace
}  // namespace quire::metal
