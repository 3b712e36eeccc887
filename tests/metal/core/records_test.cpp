#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <thread>

#include "bench.h"
#include "check.h"

// Blocks and slots that move to files and back.
namespace quire::metal {
namespace {

using test::throws;

constexpr auto kToFile = Direction::to_file;
constexpr auto kFromFile = Direction::from_file;
constexpr std::chrono::seconds kWait{10};

struct File {
  File() : fd(memfd_create("records", 0)) {}
  ~File() { close(fd); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  uint32_t sum(size_t bytes, off_t offset) const {
    std::vector<char> read(bytes);
    CHECK(pread(fd, read.data(), bytes, offset) == static_cast<ssize_t>(bytes));
    return crc32c(0, read.data(), bytes);
  }

  const int fd;
};

// Two ranges with one block each, of which a step has written the first.
struct Two {
  explicit Two(
      Kind kind, KVBackend::Options shape = Bench::quiet_shape(), fake::Options machine = {})
      : bench(kind, std::move(machine), shape),
        one(bench.kv_backend->new_range()),
        other(bench.kv_backend->new_range()) {
    heap = bench.kv_backend->new_heap();
    one->map(heap, 0, 0, 1, true);
    other->map(kind == Kind::dense ? bench.kv_backend->new_heap() : heap,
               kind == Kind::dense ? 0 : 1, 0, 1, true);
    bench.kv_backend->finish_mappings();
    for (uint64_t stamp = 1; stamp <= geometry().tokens_per_block(); ++stamp) {
      stamps.push_back(stamp);
    }
    finish(bench.step({{one.get(), 0, {}, stamps}}));
  }

  const Geometry& geometry() const { return one->geometry(); }
  void finish(const Bench::Step& step) {
    CHECK(bench.kv_backend->epochs().wait(step.epoch, kWait));
  }
  // That the range's block has what the first step wrote, or nothing.
  void check(AddressRange& range, bool written) {
    std::vector<std::string> mistakes;
    const size_t tokens = geometry().tokens_per_block();
    check_rows(RowPlaces(bench.metal(), range, tokens), geometry(),
               written ? stamps : std::vector<uint64_t>(), tokens, mistakes);
    CHECK_CASE(mistakes.empty(), mistakes.front());
  }

  Bench bench;
  std::shared_ptr<AddressRange> one;
  std::shared_ptr<AddressRange> other;
  std::shared_ptr<Heap> heap;
  std::vector<uint64_t> stamps;
  File file;
};

KVBackend::Options shape_of(const Geometry& geometry, size_t max_buffer_bytes = 0) {
  auto shape = Bench::quiet_shape();
  shape.geometry = geometry;
  shape.max_ranges = 4;
  shape.max_buffer_bytes = max_buffer_bytes;
  return shape;
}

void pass_through_a_file(Two& two) {
  const size_t bytes = two.geometry().block_bytes();
  const uint32_t sum = two.one->move_block(kToFile, 0, two.file.fd, 4096);
  CHECK(sum == two.file.sum(bytes, 4096));
  CHECK(two.other->move_block(kFromFile, 0, two.file.fd, 4096) == sum);
  two.check(*two.other, true);
  two.check(*two.one, true);
  // Another step can go on behind what was read.
  CHECK(two.other->move_block(kToFile, 0, two.file.fd, 0) == sum);
}

TEST("a block comes back from a file in other memory of every kind") {
  for (const Kind kind : {Kind::sparse, Kind::paged, Kind::dense}) {
    Two two(kind);
    two.check(*two.other, false);
    pass_through_a_file(two);
    if (kind != Kind::dense) {
      const auto sharer = two.bench.kv_backend->new_range();
      sharer->map(two.heap, 1, 0, 1, false);
      sharer->map(two.heap, 2, 1, 1, true);
      two.bench.kv_backend->finish_mappings();
      two.bench.step({{sharer.get(), 16, two.stamps, {99}}});
    }
  }
}

TEST("regions of any length come back, in several buffers, and from a ring") {
  const std::vector<int64_t> mixed = {1024, 1024, 2048, 3072, 1024, 1024, 1024, 1024, 1024};
  for (const auto& rows : {mixed, std::vector<int64_t>(9, 1024)}) {
    Two several(Kind::sparse, shape_of(Geometry(16384, 16, 4, 6, rows), size_t{640} << 10));
    CHECK(several.bench.kv_backend->buffers_per_range() > 1);
    pass_through_a_file(several);
  }
  Two ring(Kind::sparse, shape_of(Geometry(16384, 16, 4, 99, {1024, 1024, 1024}, 3)));
  pass_through_a_file(ring);
}

TEST("a block that is larger than the ring's half moves in pieces that are each waited for") {
  Two two(Kind::sparse, shape_of(Geometry(16384, 640, 2, 2, std::vector<int64_t>(4, 8192))));
  CHECK(two.geometry().block_bytes() == size_t{20} << 20);
  two.one->move_block(kToFile, 0, two.file.fd, 0);
  two.bench.machine.commits = 0;
  pass_through_a_file(two);
  CHECK(two.bench.machine.commits == 3 * 3);
}

TEST("all regions of one length are copied by one dispatch, and nothing is left in flight") {
  Two two(Kind::sparse);
  two.bench.machine.commits = two.bench.machine.waits = 0;
  pass_through_a_file(two);
  CHECK(two.bench.machine.commits == 3 && two.bench.machine.waits == 3);
  CHECK(two.bench.machine.in_flight.empty());
}

TEST("records move after a pause, and beside steps") {
  Two two(Kind::sparse, Bench::quiet_shape(), {.slowness = 20});
  pass_through_a_file(two);
  two.bench.machine.pass(std::chrono::seconds(2));
  pass_through_a_file(two);
  const auto third = two.bench.kv_backend->new_range();
  third->map(two.heap, 2, 0, 1, true);
  two.bench.kv_backend->finish_mappings();
  const auto step = two.bench.step({{third.get(), 0, {}, {1}}});
  const auto sharing = two.bench.step({{third.get(), 1, {1}, {2}}});
  pass_through_a_file(two);
  two.finish(step);
  two.finish(sharing);
}

// Runs `other` on a thread of its own while the device is waited for the first time, long enough
// for what does not wait to do harm.
template <class First, class Other>
void beside(Two& two, const First& first, const Other& other) {
  std::thread thread;
  two.bench.machine.while_waiting([&] {
    if (!thread.joinable()) {
      thread = std::thread(other);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  first();
  CHECK(thread.joinable());
  thread.join();
  two.bench.machine.while_waiting(nullptr);
}

TEST("no mapping and no residency set changes while a blit runs") {
  for (const Direction direction : {kToFile, kFromFile}) {
    Two two(Kind::sparse, Bench::quiet_shape(), {.slowness = 20});
    two.one->move_block(kToFile, 0, two.file.fd, 0);
    auto& backend = *two.bench.kv_backend;
    const auto move = [&] { two.other->move_block(direction, 0, two.file.fd, 0); };
    const auto third = backend.new_range();
    beside(two, move, [&] {
      third->map(two.heap, 2, 0, 1, true);
      backend.finish_mappings();
    });
    beside(two, move, [&] { third->unmap(0, 1); });
    beside(two, move, [&] {
      const auto heap = backend.new_heap();
      third->map(heap, 0, 0, 1, true);  // which first makes the heap resident
      backend.finish_mappings();
      third->unmap(0, 1);
      heap->release(0, 4);
    });
    const auto heap = backend.new_heap();
    third->map(heap, 0, 0, 1, true);
    backend.finish_mappings();
    third->unmap(0, 1);
    beside(two, move, [&] { heap->release(0, 4); });
  }
}

TEST("no blit begins while mappings change") {
  Two two(Kind::sparse, Bench::quiet_shape(), {.slowness = 20});
  two.one->move_block(kToFile, 0, two.file.fd, 0);
  const auto move = [&] { two.other->move_block(kFromFile, 0, two.file.fd, 0); };
  two.one->map(two.heap, 2, 1, 1, true);
  beside(two, [&] { two.bench.kv_backend->finish_mappings(); }, move);
  beside(two, [&] { two.one->unmap(1, 1); }, move);
  two.check(*two.other, true);
}

TEST("two threads move records while a third maps and unmaps") {
  Two two(Kind::sparse, Bench::quiet_shape(), {.background = true});
  const uint32_t sum = two.one->move_block(kToFile, 0, two.file.fd, 0);
  const size_t bytes = two.geometry().block_bytes();
  std::vector<std::thread> threads;
  for (off_t tier = 1; tier <= 2; ++tier) {
    threads.emplace_back([&two, tier, sum, offset = tier * static_cast<off_t>(bytes)] {
      for (int i = 0; i < 40; ++i) {
        CHECK(two.one->move_block(kToFile, 0, two.file.fd, offset) == sum);
        if (tier == 1) {
          CHECK(two.other->move_block(kFromFile, 0, two.file.fd, offset) == sum);
        }
      }
    });
  }
  const auto third = two.bench.kv_backend->new_range();
  for (int i = 0; i < 40; ++i) {
    third->map(two.heap, 2, 0, 1, true);
    two.bench.kv_backend->finish_mappings();
    third->unmap(0, 1);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  two.check(*two.other, true);
}

TEST("a block is refused that is sealed, unmapped, or that a step in flight writes") {
  for (const Kind kind : {Kind::sparse, Kind::paged}) {
    Two two(kind, Bench::quiet_shape(), {.slowness = 20});
    const int fd = two.file.fd;
    const uint32_t sum = two.one->move_block(kToFile, 0, fd, 0);
    CHECK(throws<std::logic_error>("block 1 is not mapped", [&] {
      two.one->move_block(kToFile, 1, fd, 0);
    }));
    const auto sharer = two.bench.kv_backend->new_range();
    sharer->map(two.heap, 0, 0, 1, false);
    if (kind == Kind::sparse) {
      CHECK(throws<std::logic_error>("block 0 is not mapped", [&] {
        sharer->move_block(kToFile, 0, fd, 0);
      }));
    }
    two.bench.kv_backend->finish_mappings();
    CHECK(sharer->move_block(kToFile, 0, fd, 0) == sum);
    CHECK(throws<std::logic_error>("is read-only", [&] {
      sharer->move_block(kFromFile, 0, fd, 0);
    }));
    CHECK(throws<std::logic_error>("heap block 0 is sealed", [&] {
      two.one->move_block(kFromFile, 0, fd, 0);
    }));
    two.bench.machine.freeze(true);
    const auto step = two.bench.step({{two.other.get(), 0, {}, {5}}});
    for (const Direction direction : {kToFile, kFromFile}) {
      CHECK(throws<std::logic_error>("block 0 cannot be moved: epoch 2, which writes it", [&] {
        two.other->move_block(direction, 0, fd, 0);
      }));
    }
    two.bench.machine.freeze(false);
    two.finish(step);
    two.other->move_block(kToFile, 0, fd, 0);
    CHECK(two.bench.kv_backend->shutdown());
    CHECK(throws<std::logic_error>("is not mapped", [&] {
      two.one->move_block(kToFile, 0, fd, 0);
    }));
  }
}

TEST("a ring that is refused, or a file that ends, leaves all as it was for the next record") {
  Two two(Kind::sparse);
  for (const int made : {0, 1}) {
    two.bench.machine.refuse_after("newBufferWithLength:options:", made, 1);
    CHECK(throws<std::system_error>("a GPU buffer of 8388608 bytes", [&] {
      two.one->move_block(kToFile, 0, two.file.fd, 0);
    }));
  }
  const int unwritable = open("/dev/null", O_RDONLY);
  for (int i = 0; i < 3; ++i) {  // more often than there are halves
    CHECK(throws<std::system_error>("preadv at 0, where the file ends", [&] {
      two.other->move_block(kFromFile, 0, two.file.fd, 0);
    }));
    CHECK(throws<std::system_error>("pwritev at 0", [&] {
      two.one->move_block(kToFile, 0, unwritable, 0);
    }));
  }
  close(unwritable);
  pass_through_a_file(two);
}

TEST("a device that fails a blit moves nothing any more") {
  Two two(Kind::sparse);
  two.bench.give_up();
  two.bench.machine.fail_next_commands("the GPU has had enough");
  for (int i = 0; i < 3; ++i) {
    CHECK(throws<std::runtime_error>("the GPU has had enough", [&] {
      two.one->move_block(kToFile, 0, two.file.fd, 0);
    }));
  }
  CHECK(lseek(two.file.fd, 0, SEEK_END) == 0);
}

}  // namespace
}  // namespace quire::metal
