#include <stdexcept>

#include "check.h"
#include "core/metal/gpu.h"
#include "core/metal/device_heap.h"
#include "core/metal/queues.h"
#include "core/metal/sparse.h"

namespace quire::metal {
namespace {

using test::throws;

TEST("a ledger counts mappings, and refuses a run as a whole") {
  BlockLedger ledger(4);
  int a = 0;
  int b = 0;
  ledger.map_writable(1, 2, &a);
  CHECK(ledger.mappings() == 2);
  CHECK(throws<std::logic_error>("heap block 1", [&] { ledger.map_writable(0, 2, &b); }));
  CHECK(throws<std::logic_error>("heap block 3", [&] { ledger.map_read_only(2, 2, 0); }));
  CHECK(ledger.mappings() == 2);
  ledger.map_writable(0, 1, &b);  // untouched by what was refused
  ledger.map_read_only(1, 2, 0);
  CHECK(ledger.mappings() == 5);
  CHECK(throws<std::logic_error>("5 mappings", [&] { ledger.forget_all(); }));
  ledger.unmap(1, &a);
  ledger.unmap(1, &b);
  CHECK(throws<std::logic_error>("heap block 1 is not mapped", [&] { ledger.unmap(1, &a); }));
}

TEST("a ledger keeps the newest epoch of a block, until a new owner comes") {
  BlockLedger ledger(1);
  int a = 0;
  ledger.map_writable(0, 1, &a);
  CHECK(ledger.written_epoch(0) == 0);
  ledger.write(0, &a, 7);
  ledger.write(0, &a, 5);
  CHECK(ledger.written_epoch(0) == 7);
  CHECK(throws<std::logic_error>("epoch 7", [&] { ledger.map_read_only(0, 1, 6); }));
  ledger.unmap(0, &a);
  CHECK(throws<std::logic_error>("epoch 7", [&] { ledger.map_read_only(0, 1, 6); }));
  ledger.map_writable(0, 1, &a);
  CHECK(ledger.written_epoch(0) == 0);
}

TEST("only its writer writes a block") {
  BlockLedger ledger(1);
  int a = 0;
  int b = 0;
  CHECK(throws<std::logic_error>("another range's", [&] { ledger.write(0, &a, 1); }));
  ledger.map_writable(0, 1, &a);
  CHECK(throws<std::logic_error>("another range's", [&] { ledger.write(0, &b, 1); }));
  ledger.unmap(0, &a);
  CHECK(throws<std::logic_error>("another range's", [&] { ledger.write(0, &a, 1); }));
}

TEST("a mapping that was withdrawn leaves a blank block") {
  BlockLedger ledger(2);
  int a = 0;
  ledger.map_writable(0, 2, &a);
  ledger.withdraw(0, 2);
  CHECK(ledger.mappings() == 0);
  CHECK(throws<std::logic_error>("holds nothing", [&] { ledger.map_read_only(0, 1, 0); }));
}

Geometry with_rows(const std::vector<int64_t>& row_bytes) {
  return Geometry(16384, 16, 2, 8, row_bytes);  // a region has 128 KiB per kilobyte of row
}

TEST("one buffer holds all regions where it may") {
  const BufferPlan plan(with_rows({1024, 1024, 1024, 1024}), size_t{512} << 10);
  CHECK(plan.bytes == std::vector<size_t>{size_t{512} << 10});
  CHECK(plan.places[3].buffer == 0 && plan.places[3].offset == size_t{384} << 10);
  CHECK(plan.runs.size() == 1);
  CHECK(plan.runs[0].regions == 4 && plan.runs[0].stride == size_t{128} << 10);
}

TEST("buffers are cut between layers, so that keys and values stay together") {
  const BufferPlan plan(with_rows({1024, 1024, 1024, 1024, 1024, 1024}), (size_t{640} << 10) - 1);
  CHECK(plan.bytes == (std::vector<size_t>{size_t{512} << 10, size_t{256} << 10}));
  CHECK(plan.places[4].buffer == 1 && plan.places[4].offset == 0);
  CHECK(plan.places[5].buffer == 1 && plan.places[5].offset == size_t{128} << 10);
  CHECK(plan.runs.size() == 2);
  CHECK(plan.runs[1].first_region == 4 && plan.runs[1].regions == 2);
}

TEST("regions with rows of another length are filled by themselves") {
  const BufferPlan plan(with_rows({1024, 1024, 2048, 1024}), size_t{1} << 30);
  CHECK(plan.runs.size() == 3);
  CHECK(plan.runs[1].first_region == 2 && plan.runs[1].stride == size_t{256} << 10);
  CHECK(plan.places[3].offset == size_t{512} << 10);
}

TEST("an odd region at the end is a layer of its own") {
  const BufferPlan plan(with_rows({1024, 1024, 1024}), size_t{256} << 10);
  CHECK(plan.bytes == (std::vector<size_t>{size_t{256} << 10, size_t{128} << 10}));
}

TEST("a layer that fits into no buffer is refused with its figures") {
  CHECK(throws<std::runtime_error>("take 262144 bytes, but a buffer has 262143 at most", [] {
    BufferPlan(with_rows({1024, 1024}), (size_t{256} << 10) - 1);
  }));
}

TEST("pages of sparse buffers have 16, 64 or 256 KiB") {
  CHECK(sparse_page_size(16384) == MTL::SparsePageSize16);
  CHECK(sparse_page_size(65536) == MTL::SparsePageSize64);
  CHECK(sparse_page_size(262144) == MTL::SparsePageSize256);
  CHECK(throws<std::invalid_argument>("page_bytes is 32768", [] { sparse_page_size(32768); }));
}

TEST("kinds have names, and no others") {
  for (const Kind kind : {Kind::sparse, Kind::paged, Kind::dense}) {
    CHECK(kind_named(name_of(kind)) == kind);
  }
  CHECK(throws<std::invalid_argument>("\"posix\"", [] { kind_named("posix"); }));
}

}  // namespace
}  // namespace quire::metal
