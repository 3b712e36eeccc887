#include "core/geometry.h"

#include <cstdint>
#include <limits>

#include "check.h"
#include "core/posix_memory.h"

namespace quire {
namespace {

using test::throws;

constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();
constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();

int64_t page() {
  return static_cast<int64_t>(system_page_bytes());
}

struct Shape {
  int64_t page_bytes = page();
  int64_t tokens_per_block = 16;
  int64_t blocks_per_heap = 4;
  int64_t blocks_per_range = 8;
  std::vector<int64_t> rows = {page() / 16, page() / 8};

  Geometry make() const {
    return Geometry(page_bytes, tokens_per_block, blocks_per_heap, blocks_per_range, rows);
  }
};

TEST("a geometry adds up") {
  const Geometry g = Shape{}.make();
  const auto p = static_cast<size_t>(page());
  CHECK(g.regions() == 2);
  CHECK(g.region_block_bytes(0) == p && g.region_block_bytes(1) == 2 * p);
  CHECK(g.block_bytes() == 3 * p);
  CHECK(g.heap_bytes() == 4 * 3 * p && g.range_bytes() == 8 * 3 * p);
  CHECK(g.range_region_offset(0) == 0 && g.range_region_offset(1) == 8 * p);
  CHECK(g.heap_region_offset(0) == 0 && g.heap_region_offset(1) == 4 * p);
}

TEST("regions follow each other without a gap and fill heaps and ranges") {
  Shape shape;
  shape.rows = {page(), page() / 16, page() * 3, page() / 2, page() / 16};
  const Geometry g = shape.make();
  size_t in_range = 0;
  size_t in_heap = 0;
  for (size_t r = 0; r < g.regions(); ++r) {
    CHECK(g.range_region_offset(r) == in_range);
    CHECK(g.heap_region_offset(r) == in_heap);
    in_range += g.region_block_bytes(r) * g.blocks_per_range();
    in_heap += g.region_block_bytes(r) * g.blocks_per_heap();
  }
  CHECK(in_range == g.range_bytes());
  CHECK(in_heap == g.heap_bytes());
}

TEST("each count of a geometry is refused outside its interval, by name") {
  for (int64_t bad : {kLowest, int64_t{-4096}, int64_t{-1}, int64_t{0}, kHighest, kHighest - 1,
                      int64_t{1} << 62, int64_t{1} << 40}) {
    const auto refused = [&](const char* name, int64_t Shape::* field) {
      Shape shape;
      shape.*field = bad;
      const std::string text = std::string(name) + " is " + std::to_string(bad) + ";";
      return throws<std::out_of_range>(text, [&] { shape.make(); });
    };
    CHECK_CASE(refused("page_bytes", &Shape::page_bytes), std::to_string(bad));
    CHECK_CASE(refused("tokens_per_block", &Shape::tokens_per_block), std::to_string(bad));
    CHECK_CASE(refused("blocks_per_heap", &Shape::blocks_per_heap), std::to_string(bad));
    CHECK_CASE(refused("blocks_per_range", &Shape::blocks_per_range), std::to_string(bad));
    CHECK_CASE(throws<std::out_of_range>("row_bytes is " + std::to_string(bad) + ";", [&] {
      Shape shape;
      shape.rows = {page(), bad};
      shape.make();
    }), std::to_string(bad));
  }
}

TEST("a geometry has between one and 4096 regions") {
  const auto regions = [](size_t count) {
    Shape shape;
    shape.rows.assign(count, page() / 16);
    return shape.make().regions();
  };
  CHECK(regions(1) == 1);
  CHECK(regions(4096) == 4096);
  CHECK(throws<std::out_of_range>("number of regions is 0", [&] { regions(0); }));
  CHECK(throws<std::out_of_range>("number of regions is 4097", [&] { regions(4097); }));
}

TEST("the page is a multiple of the system's and a block is whole pages") {
  Shape shape;
  shape.page_bytes = page() + 512;
  CHECK(throws<std::invalid_argument>("page_bytes is", [&] { shape.make(); }));
  shape.page_bytes = page() / 2;
  CHECK(throws<std::invalid_argument>("page_bytes is", [&] { shape.make(); }));
  Shape ragged;
  ragged.rows = {page() / 16, 80};
  CHECK(throws<std::invalid_argument>("16 rows of 80 bytes", [&] { ragged.make(); }));
}

TEST("ranges and heaps end at 2^46 bytes") {
  Shape shape;  // a block is 2^20 * 2^20 bytes
  shape.tokens_per_block = int64_t{1} << 20;
  shape.rows = {int64_t{1} << 20};
  shape.blocks_per_heap = 1;
  shape.blocks_per_range = 64;
  CHECK(shape.make().range_bytes() == size_t{1} << 46);
  shape.blocks_per_range = 65;
  CHECK(throws<std::out_of_range>("blocks_per_range is 65", [&] { shape.make(); }));
  shape.blocks_per_range = 1;
  shape.blocks_per_heap = 65;
  CHECK(throws<std::out_of_range>("blocks_per_heap is 65", [&] { shape.make(); }));
}

TEST("the largest of everything is refused, not wrapped around") {
  Shape shape;
  shape.tokens_per_block = int64_t{1} << 24;
  shape.blocks_per_heap = int64_t{1} << 24;
  shape.blocks_per_range = int64_t{1} << 24;
  shape.rows.assign(4096, int64_t{1} << 20);
  CHECK(throws<std::out_of_range>("blocks_per_range is", [&] { shape.make(); }));
}

}  // namespace
}  // namespace quire
