#include <stdexcept>

#include "bench.h"
#include "check.h"

namespace quire::metal {
namespace {

using test::throws;

Capabilities probe(const fake::Machine&) {
  return Capabilities::probe(fake::new_device().get());
}

TEST("a device says what it is, and lacks nothing") {
  fake::Machine machine;
  const Capabilities found = probe(machine);
  CHECK(found.name == "Fake M1");
  CHECK(found.families == (std::vector<std::string>{"apple7", "metal3", "metal4"}));
  CHECK(found.max_buffer_bytes == uint64_t{1} << 33);
  CHECK(found.recommended_working_set_bytes == uint64_t{1} << 33);
  CHECK(found.unified_memory && found.residency_sets && found.placement_sparse == true);
  for (const Kind kind : {Kind::sparse, Kind::paged, Kind::dense}) {
    CHECK_CASE(found.missing_for(kind).empty(), name_of(kind));
  }
  CHECK(machine.errors().empty());
  CHECK(machine.alive().empty());
}

// A message that is not answered, in whose words it is missed, and by which kinds.
struct Lack {
  const char* message;
  const char* words;
  bool paged_misses_it;
  bool dense_misses_it;
};
constexpr Lack kLacks[] = {
    {"MTLDevice newMTL4CommandQueue", "the device does not answer newMTL4", false, false},
    {"MTLDevice newHeapWithDescriptor:", "the device does not answer", false, false},
    {"MTLDevice newBufferWithLength:options:placementSparsePageSize:", "the device does not", false,
     false},
    {"MTLDevice newResidencySetWithDescriptor:error:", "the device does not answer", false, false},
    {"MTLDevice newCommandQueue", "the device does not answer", false, false},
    {"MTLDevice newLibraryWithSource:options:error:", "the device does not answer", false, false},
    {"MTLDevice newBufferWithLength:options:", "the device does not answer", true, true},
    {"MTLDevice newSharedEvent", "the device does not answer newSharedEvent", true, true},
    {"MTLHeapDescriptor setMaxCompatiblePlacementSparsePageSize:", "a heap descriptor does not",
     false, false},
    {"MTL4CommandQueue updateBufferMappings:heap:operations:count:", "a Metal 4 command queue",
     false, false},
    {"MTL4CommandQueue addResidencySet:", "a Metal 4 command queue does not", false, false},
    {"MTLCommandQueue addResidencySet:", "a command queue does not answer addResidencySet:", false,
     false},
    {"MTLResidencySet requestResidency", "a residency set does not answer", false, false},
    {"MTLSharedEvent waitUntilSignaledValue:timeoutMS:", "a shared event does not answer", true,
     true},
    {"MTLBuffer gpuAddress", "a buffer does not answer gpuAddress", true, false},
    {"MTLBuffer contents", "a buffer does not answer contents", true, true},
};

TEST("whatever a device does not answer is named to those who need it, and to nobody else") {
  for (const Lack& lack : kLacks) {
    fake::Machine machine({.lacks = {lack.message}});
    const Capabilities found = probe(machine);
    const auto missed = [&](Kind kind) {
      const auto words = found.missing_for(kind);
      return words.size() == 1 && words[0].starts_with(lack.words);
    };
    CHECK_CASE(missed(Kind::sparse), lack.message);
    CHECK_CASE(missed(Kind::paged) == lack.paged_misses_it, lack.message);
    CHECK_CASE(missed(Kind::dense) == lack.dense_misses_it, lack.message);
    CHECK_CASE(machine.errors().empty(), machine.errors().front());  // nothing was asked regardless
    CHECK_CASE(machine.alive().empty(), lack.message);
  }
}

TEST("a device from before macOS 15 has no residency sets, and runs what needs none") {
  fake::Machine machine({.lacks = {"MTLDevice newResidencySetWithDescriptor:error:",
                                   "MTLCommandQueue addResidencySet:",
                                   "MTLDevice supportsPlacementSparse",
                                   "MTLDevice newMTL4CommandQueue"}});
  const Capabilities found = probe(machine);
  CHECK(!found.residency_sets);
  CHECK(!found.placement_sparse.has_value());
  CHECK(found.missing_for(Kind::sparse).size() == 3);
  CHECK(found.missing_for(Kind::paged).empty());
  CHECK(found.missing_for(Kind::dense).empty());
}

TEST("what a device says that it cannot do is not tried") {
  {
    fake::Machine machine({.placement_sparse = false});
    const auto words = probe(machine).missing_for(Kind::sparse);
    CHECK(words.size() == 1 && words[0].find("placement sparse") != std::string::npos);
  }
  fake::Machine machine({.unified_memory = false});
  CHECK(probe(machine).missing_for(Kind::sparse).empty());
  CHECK(probe(machine).missing_for(Kind::paged).size() == 1);
}

TEST("a device that makes no queue or set lacks them, whatever it answers") {
  fake::Machine machine;
  machine.refuse("newMTL4CommandQueue", 1);
  machine.refuse("newResidencySetWithDescriptor:error:", 1);
  const auto words = probe(machine).missing_for(Kind::sparse);
  CHECK(words.size() == 2);
  CHECK(words[0] == "the device makes no residency set");
  CHECK(words[1] == "the device makes no Metal 4 command queue");
}

TEST("a backend that the device cannot run names everything that is missing") {
  fake::Machine machine({.placement_sparse = false, .lacks = {"MTLDevice newMTL4CommandQueue"}});
  auto shape = Bench::default_shape();
  CHECK(throws<std::runtime_error>(
      "the GPU Fake M1 cannot run the sparse backend: the device does not answer "
      "newMTL4CommandQueue; the device says that it has no placement sparse resources",
      [&] { KVBackend::make(fake::new_device(), shape); }));
  CHECK(machine.alive().empty());
}

TEST("whatever a device refuses while a backend is made is an error that leaves nothing behind") {
  for (const char* selector :
       {"newMTL4CommandQueue", "newCommandQueue", "newSharedEvent",
        "newResidencySetWithDescriptor:error:", "newLibraryWithSource:options:error:",
        "newComputePipelineStateWithFunction:error:"}) {
    unsigned refusals = 0;
    for (int answered = 0; answered < 6; ++answered) {
      fake::Machine machine;
      machine.refuse_after(selector, answered, 1);
      try {
        KVBackend::make(fake::new_device(), Bench::default_shape());
      } catch (const std::runtime_error&) {  // std::system_error is one
        ++refusals;
      }
      machine.run();
      CHECK_CASE(machine.errors().empty(), selector + (": " + machine.errors().front()));
      CHECK_CASE(machine.alive().empty(), selector);
    }
    CHECK_CASE(refusals > 0, selector);
  }
}

TEST("a heap or range that the device refuses is weather, and the next one may come about") {
  for (const Kind kind : {Kind::sparse, Kind::paged}) {
    Bench bench(kind);
    bench.machine.refuse("newHeapWithDescriptor:", 1);
    bench.machine.refuse("newBufferWithLength:options:", 1);
    CHECK(throws<std::system_error>("262144 bytes", [&] { bench.kv_backend->new_heap(); }));
    CHECK(bench.kv_backend->new_heap() != nullptr);
  }
  Bench bench(Kind::sparse);
  bench.machine.refuse("newBufferWithLength:options:placementSparsePageSize:", 1);
  CHECK(throws<std::system_error>("393216 bytes", [&] { bench.kv_backend->new_range(); }));
  CHECK(bench.kv_backend->new_range() != nullptr);
}

TEST("of several buffers of a range that come about in part, none is left") {
  auto shape = Bench::default_shape();
  shape.max_ranges = 1;
  shape.max_buffer_bytes = size_t{192} << 10;
  Bench bench(Kind::sparse, {}, shape);
  CHECK(bench.kv_backend->buffers_per_range() == 2);
  bench.machine.refuse_after("newBufferWithLength:options:placementSparsePageSize:", 1, 1);
  const auto before = bench.machine.alive()["MTLBuffer"];
  CHECK(throws<std::system_error>("196608 bytes", [&] { bench.kv_backend->new_range(); }));
  CHECK(bench.machine.alive()["MTLBuffer"] == before);
}

TEST("an arena is as long as a buffer may be, and has so many slices") {
  auto shape = Bench::default_shape();
  shape.kind = Kind::dense;
  shape.geometry = small_geometry(Kind::dense);
  shape.max_ranges = 3;
  const size_t slice = shape.geometry.range_bytes();
  Bench bench(Kind::dense, {.max_buffer_bytes = 3 * slice}, shape);
  for (int i = 0; i < 3; ++i) {
    bench.kv_backend->new_heap();
  }
  CHECK(throws<std::system_error>("no more than 3 slices", [&] { bench.kv_backend->new_heap(); }));
  shape.max_ranges = 4;
  const std::string figures = "4 sequences of " + std::to_string(slice) +
                              " bytes, but a buffer has " + std::to_string(3 * slice);
  CHECK(throws<std::runtime_error>(figures, [&] { KVBackend::make(bench.device, shape); }));
  shape.max_ranges = 0;
  CHECK(throws<std::runtime_error>("0 sequences", [&] { KVBackend::make(bench.device, shape); }));
}

TEST("a backend that came about in part goes without a trace") {
  fake::Machine machine({.memory_bytes = 1 << 20});
  auto shape = Bench::default_shape();
  shape.max_buffer_bytes = 65536;
  CHECK(throws<std::runtime_error>("a layer's keys and values", [&] {
    KVBackend::make(fake::new_device(), shape);
  }));
  shape.kind = Kind::dense;
  shape.geometry = Geometry(16384, 1024, 1, 1, {1024, 1024});
  shape.max_buffer_bytes = 0;
  shape.max_ranges = 1;
  CHECK(throws<std::system_error>("2097152 bytes", [&] {
    KVBackend::make(fake::new_device(), shape);
  }));
  CHECK(machine.errors().empty());
  CHECK(machine.alive().empty());
}

TEST("geometries that a kind cannot have are refused with the figure") {
  fake::Machine machine;
  const auto refused = [](Kind kind, const Geometry& geometry, const std::string& words) {
    const KVBackend::Options options{.kind = kind, .geometry = geometry, .max_ranges = 1};
    return throws<std::invalid_argument>(
        words, [&] { KVBackend::make(fake::new_device(), options); });
  };
  CHECK(refused(Kind::sparse, Geometry(32768, 32, 2, 2, {1024}), "page_bytes is 32768"));
  CHECK(refused(Kind::paged, Geometry(16384, 16, 2, 2, {1024, 2048}), "region 1 has 2048"));
  CHECK(refused(Kind::dense, Geometry(16384, 16, 1, 2, {1024}), "a dense range is one block"));
  CHECK(refused(Kind::dense, Geometry(16384, 16, 2, 1, {1024}), "a dense range is one block"));
  const KVBackend::Options options{.kind = Kind::paged,
                                   .geometry = Geometry(16384, 16, 2, 2, {1024}),
                                   .max_ranges = 1,
                                   .max_buffer_bytes = 32767};
  CHECK(throws<std::runtime_error>("a heap has 32768 bytes, but a buffer has 32767", [&] {
    KVBackend::make(fake::new_device(), options);
  }));
}

TEST("heaps and ranges of different backends do not mix") {
  Bench bench(Kind::sparse);
  const auto other = KVBackend::make(
      bench.device,
      {.kind = Kind::sparse, .geometry = small_geometry(Kind::sparse), .max_ranges = 1});
  const auto range = bench.kv_backend->new_range();
  const auto foreign_heap = other->new_heap();
  SparseRange host_range(small_geometry(Kind::sparse));
  CHECK(throws<std::invalid_argument>("not of this backend", [&] {
    range->map(foreign_heap, 0, 0, 1, true);
  }));
  CHECK(throws<std::invalid_argument>("not of this backend", [&] {
    range->map(std::make_shared<SharedHeap>(small_geometry(Kind::sparse)), 0, 0, 1, true);
  }));
  CHECK(throws<std::invalid_argument>("not of this backend", [&] { other->own(*range); }));
  CHECK(throws<std::invalid_argument>("not of this backend", [&] {
    bench.kv_backend->own(host_range);
  }));
  CHECK(throws<std::out_of_range>("region 4 of 4", [&] { bench.kv_backend->place(4); }));
}

TEST("questions that a kind has no answer to are bugs") {
  {
    Bench bench(Kind::sparse);
    const auto range = bench.kv_backend->new_range();
    CHECK(throws<std::logic_error>("page table", [&] {
      bench.kv_backend->own(*range).page_addresses(0);
    }));
  }
  {
    Bench bench(Kind::paged);
    const auto range = bench.kv_backend->new_range();
    CHECK(throws<std::logic_error>("not contiguous", [&] { bench.kv_backend->own(*range).view(0); }));
    CHECK(throws<std::logic_error>("1 blocks was asked for; 0 are mapped", [&] {
      bench.kv_backend->own(*range).page_addresses(1);
    }));
    CHECK(range->region(0) == nullptr);
  }
  Bench bench(Kind::dense);
  const auto range = bench.kv_backend->new_range();
  CHECK(range->region(0) == nullptr);
  CHECK(throws<std::logic_error>("without a slice", [&] { bench.kv_backend->own(*range).row_base(0); }));
}

}  // namespace
}  // namespace quire::metal
