#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <system_error>
#include <vector>

#include "check.h"
#include "core/address_range.h"
#include "core/heap.h"
#include "core/mapper.h"
#include "core/posix_memory.h"
#include "core/row_table.h"
#include "probes.h"

namespace quire {
namespace {

using test::mappings_inside;
using test::readable;
using test::RefuseMadvise;
using test::RefuseMmap;
using test::throws;
using test::writable;

constexpr bool kWritable = true;
constexpr bool kReadOnly = false;

size_t page() {
  return system_page_bytes();
}

// Regions of one, two and one pages a block: a wrong offset lands in another region.
Geometry small_geometry(int64_t blocks_per_heap = 5, int64_t blocks_per_range = 9) {
  const auto p = static_cast<int64_t>(page());
  return Geometry(p, 16, blocks_per_heap, blocks_per_range, {p / 16, p / 8, p / 16});
}

std::vector<std::string> mappings_of(const SparseRange& range) {
  return mappings_inside(range.base() - page(), page() + range.geometry().range_bytes());
}

std::byte* block_of(const AddressRange& range, size_t region, size_t block) {
  return range.region(region) + block * range.geometry().region_block_bytes(region);
}

// --- random operations against a model ------------------------------------------------------------

// What every page of every heap must hold, whether memory stands behind it, which heap block stands
// behind each block of each range, and whether it may be written there.
class World {
 public:
  static constexpr size_t kHeaps = 3;
  static constexpr size_t kRanges = 4;
  static constexpr size_t kWords = 8;  // of each page that are written and compared

  explicit World(uint64_t seed) : random_(seed), shape_(small_geometry()) {
    for (size_t h = 0; h < kHeaps; ++h) {
      heaps_.push_back(std::make_shared<SharedHeap>(shape_));
      pages_.emplace_back(shape_.heap_bytes() / page());
    }
    for (size_t r = 0; r < kRanges; ++r) {
      ranges_.push_back(std::make_unique<SparseRange>(shape_));
      backing_.emplace_back(shape_.blocks_per_range());
    }
  }

  void step() {
    switch (below(10)) {
      case 0: case 1: case 2: return map();
      case 3: return unmap();
      case 4: return release();
      case 5: case 6: case 7: return write();
      default: return read();
    }
  }

  void check_all() {
    for (size_t r = 0; r < kRanges; ++r) {
      size_t prefix = 0;
      while (prefix < backing_[r].size() && backing_[r][prefix]) {
        ++prefix;
      }
      CHECK(ranges_[r]->mapped_tokens() == prefix * shape_.tokens_per_block());
      for (size_t block = 0; block < shape_.blocks_per_range(); ++block) {
        size_t first = backing_[r][block] ? block : prefix;
        size_t end = first;
        while (first > 0 && backing_[r][first - 1]) {
          --first;
        }
        while (end < backing_[r].size() && backing_[r][end]) {
          ++end;
        }
        const size_t tokens = shape_.tokens_per_block();
        const auto run = ranges_[r]->mapped_run(block * tokens + tokens / 2);
        CHECK(run.end == end * tokens && (run.first == first * tokens || !backing_[r][block]));
        for (size_t region = 0; region < shape_.regions(); ++region) {
          if (!backing_[r][block]) {
            CHECK(!readable(block_of(*ranges_[r], region, block)));
            continue;
          }
          CHECK(writable(block_of(*ranges_[r], region, block)) == backing_[r][block]->writable);
          model(r, region, block, 0).touched = true;
          for (size_t p = 0; p < shape_.region_block_bytes(region) / page(); ++p) {
            check_page(r, region, block, p);
          }
        }
      }
    }
    for (size_t h = 0; h < kHeaps; ++h) {
      size_t charged = 0;
      for (const Page& p : pages_[h]) {
        charged += p.touched ? page() : 0;
      }
      CHECK(heaps_[h]->committed_bytes() == charged);
    }
  }

 private:
  struct Page {
    uint64_t word = 0;
    bool touched = false;
  };
  struct Place {
    size_t heap;
    size_t block;
    bool writable;
  };

  size_t below(size_t end) { return random_() % end; }

  // A run of blocks and, in the heap, where it starts.
  struct Run {
    size_t first;
    size_t heap_first;
    size_t count;
  };
  Run any_run() {
    const size_t count = 1 + below(3);
    return {below(shape_.blocks_per_range() - count + 1),
            below(shape_.blocks_per_heap() - count + 1), count};
  }
  bool all_mapped(size_t range, const Run& run, bool mapped) const {
    const auto first = backing_[range].begin() + static_cast<ptrdiff_t>(run.first);
    return std::all_of(first, first + static_cast<ptrdiff_t>(run.count),
                       [&](const auto& place) { return place.has_value() == mapped; });
  }

  void map() {
    const size_t r = below(kRanges);
    const size_t h = below(kHeaps);
    const Run run = any_run();
    const size_t kind = below(3);  // 0: read-only, 1: writable, 2: committed as well
    const auto call = [&] {
      const auto heap_first = static_cast<int64_t>(run.heap_first);
      const auto first = static_cast<int64_t>(run.first);
      const auto count = static_cast<int64_t>(run.count);
      if (kind == 2) {
        ranges_[r]->map_committed(heaps_[h], heap_first, first, count);
      } else {
        ranges_[r]->map(heaps_[h], heap_first, first, count, kind == 1);
      }
    };
    const auto before = mappings_of(*ranges_[r]);
    if (!all_mapped(r, run, false)) {
      CHECK(throws<std::logic_error>("is mapped already", call));
      CHECK(mappings_of(*ranges_[r]) == before);
      return;
    }
    if (below(4) == 0) {  // the system refuses one of the regions
      const RefuseMmap refuse(static_cast<int>(below(shape_.regions())));
      CHECK(throws<std::system_error>("mmap of ", call));
      CHECK(mappings_of(*ranges_[r]) == before);
      return;
    }
    call();
    for (size_t i = 0; i < run.count; ++i) {
      backing_[r][run.first + i] = Place{h, run.heap_first + i, kind > 0};
    }
    for (size_t region = 0; kind == 2 && region < shape_.regions(); ++region) {
      for (size_t b = run.heap_first; b < run.heap_first + run.count; ++b) {
        for (size_t p = 0; p < shape_.region_block_bytes(region) / page(); ++p) {
          pages_[h][heap_page(region, b, p)].touched = true;
        }
      }
    }
  }

  void unmap() {
    const size_t r = below(kRanges);
    const Run run = any_run();
    const auto call = [&] {
      ranges_[r]->unmap(static_cast<int64_t>(run.first), static_cast<int64_t>(run.count));
    };
    if (!all_mapped(r, run, kWritable)) {
      const auto before = mappings_of(*ranges_[r]);
      CHECK(throws<std::logic_error>("is not mapped", call));
      CHECK(mappings_of(*ranges_[r]) == before);
      return;
    }
    call();
    for (size_t i = 0; i < run.count; ++i) {
      backing_[r][run.first + i].reset();
    }
  }

  bool stands_somewhere(size_t heap, size_t block) const {
    for (const auto& range : backing_) {
      for (const auto& place : range) {
        if (place && place->heap == heap && place->block == block) {
          return true;
        }
      }
    }
    return false;
  }

  void release() {
    const size_t h = below(kHeaps);
    size_t first = below(shape_.blocks_per_heap());
    size_t count = 1 + below(shape_.blocks_per_heap() - first);
    if (below(3) == 0) {
      first = 0;
      count = shape_.blocks_per_heap();
    }
    for (size_t b = first; b < first + count; ++b) {
      if (stands_somewhere(h, b)) {
        return;
      }
    }
    heaps_[h]->release(static_cast<int64_t>(first), static_cast<int64_t>(count));
    for (size_t region = 0; region < shape_.regions(); ++region) {
      for (size_t b = first; b < first + count; ++b) {
        for (size_t p = 0; p < shape_.region_block_bytes(region) / page(); ++p) {
          pages_[h][heap_page(region, b, p)] = Page{};
        }
      }
    }
  }

  size_t heap_page(size_t region, size_t block, size_t p) const {
    return (shape_.heap_region_offset(region) + block * shape_.region_block_bytes(region)) /
               page() + p;
  }

  // A page of a mapped block, if chance finds one: range, region, block, page of the block.
  std::optional<std::array<size_t, 4>> any_page() {
    const size_t r = below(kRanges);
    const size_t block = below(shape_.blocks_per_range());
    const size_t region = below(shape_.regions());
    if (!backing_[r][block]) {
      return std::nullopt;
    }
    return {{r, region, block, below(shape_.region_block_bytes(region) / page())}};
  }
  Page& model(size_t r, size_t region, size_t block, size_t p) {
    const Place& place = *backing_[r][block];
    return pages_[place.heap][heap_page(region, place.block, p)];
  }
  uint64_t* word_of(size_t r, size_t region, size_t block, size_t p, size_t word) const {
    std::byte* const start = block_of(*ranges_[r], region, block) + p * page();
    return reinterpret_cast<uint64_t*>(start) + word * (page() / 8 - 1) / (kWords - 1);
  }

  void write() {
    const auto at = any_page();
    if (at && backing_[(*at)[0]][(*at)[2]]->writable) {
      const auto [r, region, block, p] = *at;
      const uint64_t value = random_();
      for (size_t w = 0; w < kWords; ++w) {
        *word_of(r, region, block, p, w) = value + w;
      }
      model(r, region, block, p) = {value, true};
    }
  }
  void read() {
    if (const auto at = any_page()) {
      const auto [r, region, block, p] = *at;
      check_page(r, region, block, p);
    }
  }
  void check_page(size_t r, size_t region, size_t block, size_t p) {
    Page& expected = model(r, region, block, p);
    for (size_t w = 0; w < kWords; ++w) {
      const uint64_t want = expected.word == 0 ? 0 : expected.word + w;
      CHECK(*word_of(r, region, block, p, w) == want);
    }
    expected.touched = true;  // a read of shared memory commits a page of zeros
  }

  std::mt19937_64 random_;
  Geometry shape_;
  std::vector<std::shared_ptr<SharedHeap>> heaps_;
  std::vector<std::unique_ptr<SparseRange>> ranges_;
  std::vector<std::vector<Page>> pages_;                     // [heap][page]
  std::vector<std::vector<std::optional<Place>>> backing_;  // [range][block]
};

TEST("memory is what a model of it says, whatever is mapped, unmapped, written and released") {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    World world(seed);
    for (int step = 0; step < 1500; ++step) {
      world.step();
      if (step % 100 == 99) {
        world.check_all();
      }
    }
  }
  CHECK(test::heap_mappings() == 0);
}

// --- single promises ------------------------------------------------------------------------------

TEST("a map that is refused at any region leaves no trace, whatever stands beside it") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  SparseRange range(shape);
  // The refused run joins on to these, in file and in addresses.
  range.map(heap, 0, 0, 2, kWritable);
  range.map(heap, 3, 3, 2, kWritable);
  std::memset(block_of(range, 1, 1), 7, shape.region_block_bytes(1));
  const auto before = mappings_of(range);
  for (size_t region = 0; region < shape.regions(); ++region) {
    const RefuseMmap refuse(static_cast<int>(region));
    CHECK(throws<std::system_error>("mmap of ", [&] { range.map(heap, 2, 2, 1, kWritable); }));
    CHECK(mappings_of(range) == before);
    CHECK(range.mapped_tokens() == 2 * shape.tokens_per_block());
  }
  range.map(heap, 2, 2, 1, kWritable);
  CHECK(range.mapped_tokens() == 5 * shape.tokens_per_block());
  CHECK(*block_of(range, 1, 1) == std::byte{7});
}

TEST("what was mapped is undone and unmapped even when the system refuses every new mapping once") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  SparseRange range(shape);
  range.map(heap, 0, 0, 1, kWritable);
  const auto before = mappings_of(range);
  for (size_t region = 1; region < shape.regions(); ++region) {
    const RefuseMmap refuse(static_cast<int>(region), 2);  // the map, and the first step back
    CHECK(throws<std::system_error>("mmap of ", [&] { range.map(heap, 1, 1, 1, kWritable); }));
    CHECK(mappings_of(range) == before);
  }
  {
    const RefuseMmap refuse(0, 1);
    range.unmap(0, 1);
  }
  CHECK(!readable(range.base()));
  range.map(heap, 0, 0, 1, kWritable);
  CHECK(mappings_of(range) == before);
}

TEST("what cannot be undone is no refusal but a failure") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  Mapper mapper;
  const auto range = std::make_shared<SparseRange>(shape);
  const uint64_t ticket = mapper.attempt([&] {
    const RefuseMmap refuse(1, 100);
    range->map_committed(heap, 0, 0, 1);
  });
  CHECK(mapper.wait(ticket, std::chrono::seconds(30)));
  CHECK(!mapper.refused(ticket));
  CHECK(mapper.failure().find("memory that must go stays mapped: mmap of ") == 0);
}

TEST("a block that many ranges share is read everywhere and written only where it is writable") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  SparseRange owner(shape);
  owner.map(heap, 2, 1, 2, kWritable);
  std::vector<std::unique_ptr<SparseRange>> sharers;
  for (int i = 0; i < 50; ++i) {
    sharers.push_back(std::make_unique<SparseRange>(shape));
    sharers.back()->map(heap, 2, 0, 2, kReadOnly);
    sharers.back()->map(heap, 0, 2, 1, kWritable);
  }
  for (size_t region = 0; region < shape.regions(); ++region) {
    std::memset(block_of(owner, region, 2), 5, shape.region_block_bytes(region));
    for (const auto& range : sharers) {
      CHECK(*block_of(*range, region, 1) == std::byte{5});
      CHECK(!writable(block_of(*range, region, 0)) && !writable(block_of(*range, region, 1)));
      CHECK(writable(block_of(*range, region, 2)));
    }
    CHECK(writable(block_of(owner, region, 1)));
  }
  CHECK(sharers[0]->mapped_tokens() == 3 * shape.tokens_per_block());
  sharers[0]->unmap(0, 2);
  sharers[0]->map(heap, 4, 0, 1, kWritable);  // what it was mapped as before is forgotten
  CHECK(writable(block_of(*sharers[0], 1, 0)));
  CHECK(!sharers[0]->first_read_only(0, 16));
}

TEST("the first read-only block of a run of tokens is found") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  SparseRange range(shape);
  range.map(heap, 0, 0, 2, kReadOnly);
  range.map(heap, 2, 2, 1, kWritable);
  range.map(heap, 3, 3, 1, kReadOnly);
  CHECK(range.first_read_only(0, 64) == 0u);
  CHECK(range.first_read_only(31, 1) == 1u);
  CHECK(range.first_read_only(31, 2) == 1u);
  CHECK(!range.first_read_only(32, 1) && !range.first_read_only(32, 16));
  CHECK(range.first_read_only(32, 17) == 3u);
  CHECK(range.first_read_only(63, 1) == 3u);
}

TEST("a committed map holds its memory before it is written, and no more") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  SparseRange range(shape);
  range.map_committed(heap, 1, 0, 3);
  CHECK(heap->committed_bytes() == 3 * shape.block_bytes());
  for (size_t region = 0; region < shape.regions(); ++region) {
    std::memset(block_of(range, region, 0), 1, 3 * shape.region_block_bytes(region));
  }
  CHECK(heap->committed_bytes() == 3 * shape.block_bytes());
}

TEST("what was written before is still there when its block is committed again") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  SparseRange range(shape);
  range.map(heap, 1, 0, 1, kWritable);
  std::memset(block_of(range, 1, 0), 9, shape.region_block_bytes(1));
  range.unmap(0, 1);
  range.map_committed(heap, 0, 3, 3);
  CHECK(*block_of(range, 1, 4) == std::byte{9});
  CHECK(*block_of(range, 1, 3) == std::byte{0} && *block_of(range, 1, 5) == std::byte{0});
}

TEST("memory that cannot be committed ahead is committed when it is written") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  for (const int error : {EINVAL, ENOSYS, EFAULT, ENOMEM}) {
    const RefuseMadvise refuse(error);
    SparseRange range(shape);
    range.map_committed(heap, 0, 0, 2);
    CHECK(heap->committed_bytes() == 0);
    CHECK(range.mapped_tokens() == 2 * shape.tokens_per_block());
    std::memset(block_of(range, 1, 1), 7, shape.region_block_bytes(1));
    CHECK(heap->committed_bytes() == shape.region_block_bytes(1));
    heap->release(0, 5);
  }
}

TEST("a dense range is writable or not mapped at all") {
  const Geometry shape = small_geometry(1, 1);
  const auto heap = std::make_shared<DenseHeap>(shape);
  DenseRange range(shape);
  CHECK(throws<std::invalid_argument>("always writable", [&] {
    range.map(heap, 0, 0, 1, kReadOnly);
  }));
  CHECK(heap->committed_bytes() == 0 && range.mapped_tokens() == 0);
  range.map_committed(heap, 0, 0, 1);
  CHECK(heap->committed_bytes() == shape.heap_bytes());
  CHECK(!range.first_read_only(0, 16));
}

TEST("a refused reservation or header is an error, and nothing stays behind") {
  const Geometry shape = small_geometry(1, 1 << 20);  // 16 GiB: one that stays behind is seen
  const size_t before = test::address_space_bytes();
  for (int calls = 0; calls < 2; ++calls) {
    const RefuseMmap refuse(calls);
    CHECK(throws<std::system_error>(" bytes", [&] { SparseRange range(shape); }));
  }
  { const SparseRange range(shape); }
  CHECK(test::address_space_bytes() < before + shape.range_bytes() / 2);
}

TEST("below a range lies a page that holds its size, and below a dense heap too") {
  const Geometry shape = small_geometry();
  const SparseRange range(shape);
  size_t size = 0;
  std::memcpy(&size, range.base() - sizeof(size), sizeof(size));
  CHECK(size == shape.range_bytes());
  CHECK(!readable(range.base()));
  const Geometry whole = small_geometry(1, 1);
  DenseHeap heap(whole);
  std::memcpy(&size, heap.memory() - sizeof(size), sizeof(size));
  CHECK(size == whole.heap_bytes());
}

TEST("a dense range has its heap's memory, zeros at first, and gives it back") {
  const Geometry shape = small_geometry(1, 1);
  const auto heap = std::make_shared<DenseHeap>(shape);
  DenseRange range(shape);
  CHECK(range.base() == nullptr && heap->committed_bytes() == 0);
  for (int round = 0; round < 3; ++round) {
    range.map(heap, 0, 0, 1, kWritable);
    CHECK(range.base() == heap->memory());
    CHECK(heap->committed_bytes() == shape.heap_bytes());
    CHECK(range.mapped_tokens() == shape.tokens_per_block());
    for (size_t i = 0; i < shape.heap_bytes(); i += 64) {
      CHECK(range.base()[i] == std::byte{0});
    }
    std::memset(range.base(), 9, shape.heap_bytes());
    std::byte* const base = range.base();
    range.unmap(0, 1);
    CHECK(range.base() == nullptr && range.mapped_tokens() == 0);
    heap->release(0, 1);
    CHECK(heap->committed_bytes() == 0 && !readable(base));
  }
}

TEST("a dense map that is refused leaves no trace") {
  const Geometry shape = small_geometry(1, 1);
  const auto heap = std::make_shared<DenseHeap>(shape);
  DenseRange range(shape);
  {
    const RefuseMmap refuse(0, 100);
    CHECK(throws<std::system_error>("mmap of ", [&] { range.map(heap, 0, 0, 1, kWritable); }));
    CHECK(range.base() == nullptr && range.mapped_tokens() == 0);
    CHECK(heap->committed_bytes() == 0);
  }
  range.map(heap, 0, 0, 1, kWritable);
  CHECK(range.base() != nullptr);
}

TEST("heaps and ranges of other kinds and other geometries are refused") {
  const Geometry one = small_geometry(1, 1);
  const Geometry other = small_geometry(2, 1);
  SparseRange sparse(one);
  DenseRange dense(one);
  const auto shared = std::make_shared<SharedHeap>(one);
  const auto plain = std::make_shared<DenseHeap>(one);
  const auto foreign = std::make_shared<SharedHeap>(other);
  const auto map = [](AddressRange& range, const std::shared_ptr<Heap>& heap, int64_t heap_block) {
    return [&range, heap, heap_block] { range.map(heap, heap_block, 0, 1, kWritable); };
  };
  CHECK(throws<std::invalid_argument>("shared heaps", map(sparse, plain, 0)));
  CHECK(throws<std::invalid_argument>("dense heap", map(dense, shared, 0)));
  CHECK(throws<std::out_of_range>("heap blocks", map(sparse, foreign, 1)));
  CHECK(throws<std::invalid_argument>("different geometries", map(sparse, foreign, 0)));
  CHECK(throws<std::invalid_argument>("one block", [&] { DenseRange range(other); }));
  CHECK(sparse.mapped_tokens() == 0 && dense.mapped_tokens() == 0);
}

TEST("a large run is unmapped whole, whatever the size of the pieces") {
  const auto p = static_cast<int64_t>(page());
  // One region of 160 MiB, which is two pieces and a half.
  const int64_t pages = (int64_t{160} << 20) / p;
  const Geometry shape(p, p / 16, pages, pages, {16});
  const auto heap = std::make_shared<SharedHeap>(shape);
  SparseRange range(shape);
  const auto blocks = static_cast<int64_t>(shape.blocks_per_range());
  range.map(heap, 0, 0, blocks, kWritable);
  const auto before_last = static_cast<size_t>(blocks - 1);
  *block_of(range, 0, 0) = std::byte{1};
  *block_of(range, 0, before_last) = std::byte{1};
  range.unmap(1, blocks - 2);
  for (size_t block = 0; block < static_cast<size_t>(blocks); ++block) {
    if (block % 997 == 0 || block + 2 >= static_cast<size_t>(blocks) || block < 3) {
      const bool kept = block == 0 || block == before_last;
      CHECK(readable(block_of(range, 0, block)) == kept);
    }
  }
  CHECK(mappings_of(range).size() == 4);  // header, first block, nothing, last block
}

TEST("the engine maps and writes while the mapper takes other blocks away") {
  const Geometry shape = small_geometry(4, 4);
  Mapper mapper;
  const auto heap = std::make_shared<SharedHeap>(shape);
  std::vector<std::shared_ptr<SparseRange>> ranges;
  for (int r = 0; r < 4; ++r) {
    ranges.push_back(std::make_shared<SparseRange>(shape));
  }
  uint64_t last = 0;
  std::vector<uint64_t> tickets(4, 0);
  for (int round = 0; round < 300; ++round) {
    const size_t r = static_cast<size_t>(round) % 4;
    CHECK(mapper.wait(tickets[r], std::chrono::seconds(30)));
    // Heap block r belongs to range r: three blocks of it are freed while the fourth is in use.
    ranges[r]->map(heap, static_cast<int64_t>(r), 0, 1, kWritable);
    CHECK(ranges[r]->mapped_tokens() == shape.tokens_per_block());
    CHECK(*block_of(*ranges[r], 1, 0) == std::byte{0});
    std::memset(block_of(*ranges[r], 1, 0), round % 255 + 1, shape.region_block_bytes(1));
    mapper.submit([range = ranges[r]] { range->unmap(0, 1); });
    last = mapper.submit([heap, r] { heap->release(static_cast<int64_t>(r), 1); });
    tickets[r] = last;
  }
  CHECK(mapper.wait(last, std::chrono::seconds(30)));
  CHECK(mapper.failure().empty());
  CHECK(heap->committed_bytes() == 0);
}

TEST("the mapper maps ahead while the engine reads, writes and plans rows of the same range") {
  const Geometry shape = small_geometry(9, 9);
  Mapper mapper;
  const auto heap = std::make_shared<SharedHeap>(shape);
  const auto range = std::make_shared<SparseRange>(shape);
  for (int round = 0; round < 60; ++round) {
    range->map(heap, 0, 0, 1, kReadOnly);
    range->map(heap, 1, 1, 1, kWritable);
    uint64_t ticket = 0;
    for (int64_t block = 2; block < 9; ++block) {
      ticket = mapper.attempt([=] { range->map_committed(heap, block, block, 1); });
    }
    size_t mapped = 2;
    for (size_t planned = 1; planned < 9;) {
      const size_t now = range->mapped_tokens() / shape.tokens_per_block();
      CHECK(now >= mapped);
      mapped = now;
      for (; planned < mapped; ++planned) {
        RowTable({{range, static_cast<int64_t>(16 * planned), 16}}).require_writable();
        std::memset(block_of(*range, 2, planned), round + 1, shape.region_block_bytes(2));
      }
    }
    CHECK(mapper.wait(ticket, std::chrono::seconds(30)));
    CHECK(!mapper.refused(ticket));
    ticket = mapper.submit([=] { range->unmap(0, 9); });
    CHECK(mapper.wait(ticket, std::chrono::seconds(30)));
    CHECK(range->mapped_tokens() == 0);
  }
  CHECK(mapper.failure().empty());
}

TEST("rows of read-only blocks are in a table, which says that they cannot be written") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  const auto a = std::make_shared<SparseRange>(shape);
  a->map(heap, 0, 0, 2, kReadOnly);
  a->map(heap, 2, 2, 1, kWritable);
  const auto refused = [&](int64_t start, int64_t count, const std::string& says) {
    const RowTable table({{a, 40, 1}, {a, start, count}, {a, 3, 1}});
    return throws<std::out_of_range>(says, [&] { table.require_writable(); });
  };
  CHECK(refused(0, 1, "segment [0, 0 + 1) cannot be written: block 0 is read-only"));
  CHECK(refused(31, 1, "segment [31, 31 + 1) cannot be written: block 1 is read-only"));
  CHECK(refused(20, 20, "segment [20, 20 + 20) cannot be written: block 1 is read-only"));
  CHECK(refused(32, 1, "segment [3, 3 + 1)"));
  RowTable({{a, 32, 16}}).require_writable();
}

TEST("rows behind a gap see the mapped rows before them, and no wider window") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  const auto a = std::make_shared<SparseRange>(shape);
  a->map(heap, 0, 0, 1, kWritable);
  a->map(heap, 1, 2, 2, kWritable);
  RowTable({{a, 0, 16}}).require_mapped(SIZE_MAX);
  for (const int64_t start : {32, 33, 47, 48, 60}) {
    const RowTable table({{a, start, 4}, {a, 3, 1}});
    const auto seen = static_cast<size_t>(start - 31);
    table.require_mapped(seen);
    for (const size_t window : {seen + 1, size_t{64}, SIZE_MAX}) {
      CHECK(throws<std::out_of_range>("rows can see " + std::to_string(seen) + " tokens", [&] {
        table.require_mapped(window);
      }));
    }
  }
}

TEST("a row table lists positions in order and refuses rows without memory") {
  const Geometry shape = small_geometry();
  const auto heap = std::make_shared<SharedHeap>(shape);
  const auto a = std::make_shared<SparseRange>(shape);
  const auto b = std::make_shared<SparseRange>(shape);
  a->map(heap, 0, 0, 2, kWritable);
  b->map(heap, 2, 0, 1, kWritable);
  b->map(heap, 3, 2, 1, kWritable);  // behind a gap
  const RowTable table({{a, 30, 2}, {b, 0, 3}, {a, 5, 1}});
  const std::vector<size_t> positions = {30, 31, 0, 1, 2, 5};
  CHECK(table.rows().size() == positions.size());
  for (size_t i = 0; i < positions.size(); ++i) {
    CHECK(table.rows()[i].position == positions[i]);
    CHECK(table.rows()[i].range == (i < 2 || i == 5 ? a : b).get());
  }
  const auto refused = [&](const std::shared_ptr<AddressRange>& range, int64_t start,
                           int64_t count) {
    return throws<std::out_of_range>(
        "segment of mapped tokens [" + std::to_string(start), [&] {
          RowTable({{a, 0, 1}, {range, start, count}});
        });
  };
  CHECK(refused(a, 31, 2) && refused(a, 32, 1) && refused(b, 0, 17) && refused(b, 30, 3));
  CHECK(refused(b, 16, 1) && refused(b, 47, 2));
  CHECK(refused(a, -1, 1) && refused(a, 0, 0) && refused(a, 0, -1));
  CHECK(refused(a, INT64_MAX, 1) && refused(a, 1, INT64_MAX) && refused(a, INT64_MIN, INT64_MAX));
  CHECK(throws<std::invalid_argument>("at least one segment", [] { RowTable({}); }));
  const auto foreign = std::make_shared<SparseRange>(small_geometry(5, 8));
  CHECK(throws<std::invalid_argument>("one geometry", [&] {
    RowTable({{a, 0, 1}, {foreign, 0, 1}});
  }));
}

}  // namespace
}  // namespace quire
