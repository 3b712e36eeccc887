#include "memory.h"

#include "commands.h"
#include "events.h"

namespace quire::fake {
namespace {

constexpr uint64_t kPlainPage = uint64_t{16} << 10;
constexpr uint64_t kShared = 0;

uint64_t storage_of(uint64_t options) { return options >> 4 & 15; }

std::string page_name(uint64_t page) { return "page " + std::to_string(page); }

const auto defined = [] {
  define("MTLHeapDescriptor")
      .makes<HeapDescriptor>()
      .method<&HeapDescriptor::set_type>("setType:")
      .method<&HeapDescriptor::set_storage_mode>("setStorageMode:")
      .method<&HeapDescriptor::set_hazard_tracking>("setHazardTrackingMode:")
      .method<&HeapDescriptor::set_size>("setSize:")
      .method<&HeapDescriptor::set_page_size>("setMaxCompatiblePlacementSparsePageSize:");
  define("MTLHeap").method<&Heap::length>("size");
  define("MTLBuffer")
      .method<&Buffer::length>("length")
      .method<&Buffer::contents>("contents")
      .method<&Buffer::heap>("heap")
      .method<&Buffer::gpu_address>("gpuAddress");
  return true;
}();

}  // namespace

uint64_t page_bytes_of(int64_t sparse_page_size) {
  switch (sparse_page_size) {
    case 101:
      return uint64_t{16} << 10;
    case 102:
      return uint64_t{64} << 10;
    case 103:
      return uint64_t{256} << 10;
    default:
      return 0;
  }
}

void Allocation::check_release() const {
  if (in_residency_sets > 0) {
    report("a " + name() + " was released while a residency set holds it");
  }
  for (const CommandBuffer* commands : Machine::current().in_flight) {
    if (commands->uses(this)) {
      report("a " + name() + " was released while a command in flight uses it");
    }
  }
}

Heap::Heap(const HeapDescriptor& descriptor)
    : Allocation("MTLHeap", descriptor.size),
      page_bytes_(page_bytes_of(descriptor.page_size)),
      memory_(std::make_unique<MemoryFile>(descriptor.size)) {}

void Heap::dealloc() {
  Machine& machine = Machine::current();
  const std::lock_guard lock(machine.mutex);
  check_release();
  if (queued > 0) {
    report("a heap was released while a mapping operation of it is queued");
  }
  if (!addresses_of_page.empty()) {
    report(
        "a heap was released while " + std::to_string(addresses_of_page.size()) +
        " pages of it are mapped");
  }
  if (!machine.in_flight.empty()) {
    report("a heap was released while a command is in flight");
  }
  machine.discharge(length());
  memory_.reset();
}

Buffer::Buffer(uint64_t bytes, uint64_t options)
    : Allocation("MTLBuffer", bytes),
      options_(options),
      memory_(std::make_unique<MemoryFile>(bytes)),
      addresses_(std::make_unique<Addresses>(bytes, kPlainPage)) {
  addresses_->map(0, *memory_, 0, bytes);
  Machine::current().addresses[gpu_address()] = this;
}

Buffer::Buffer(uint64_t bytes, uint64_t options, uint64_t page_bytes)
    : Allocation("MTLBuffer", bytes),
      options_(options),
      page_bytes_(page_bytes),
      addresses_(std::make_unique<Addresses>(bytes, page_bytes)) {
  Machine::current().addresses[gpu_address()] = this;
}

std::byte* Buffer::contents() {
  if (storage_of(options_) != kShared) {
    report("contents of a buffer that the CPU cannot reach were asked for");
    return nullptr;
  }
  Machine& machine = Machine::current();
  const std::lock_guard lock(machine.mutex);
  for (const CommandBuffer* commands : machine.in_flight) {
    if (commands->stages(this)) {
      report("contents of a buffer were asked for while a command in flight copies them");
    }
  }
  return memory_->contents();
}

void Buffer::dealloc() {
  Machine& machine = Machine::current();
  const std::lock_guard lock(machine.mutex);
  check_release();
  if (queued > 0) {
    report("a sparse buffer was released while a mapping operation of it is queued");
  }
  if (!pages.empty()) {
    report(
        "a sparse buffer was released while " + std::to_string(pages.size()) +
        " pages of it are mapped");
  }
  for (const auto& [page, place] : pages) {
    place.heap->addresses_of_page.erase(place.heap_page);
  }
  machine.addresses.erase(gpu_address());
  if (!sparse()) {
    machine.discharge(length());
  }
  addresses_.reset();
  memory_.reset();
}

void Buffer::map(uint64_t page, Heap& heap, uint64_t heap_page) {
  if (pages.contains(page)) {
    report("map: " + page_name(page) + " of the buffer is mapped already");
    return;
  }
  const uint64_t address = gpu_address() + page * page_bytes_;
  for (const CommandBuffer* commands : Machine::current().in_flight) {
    if (commands->writes(&heap, heap_page)) {
      report("map: a command in flight writes " + page_name(heap_page) + " of the heap");
    }
  }
  addresses_->map(page * page_bytes_, heap.memory(), heap_page * page_bytes_, page_bytes_);
  pages[page] = {&heap, heap_page};
  heap.addresses_of_page[heap_page].insert(address);
}

void Buffer::unmap(uint64_t page) {
  const auto found = pages.find(page);
  if (found == pages.end()) {
    report("unmap: " + page_name(page) + " of the buffer is not mapped");
    return;
  }
  auto& places = found->second.heap->addresses_of_page;
  const auto at = places.find(found->second.heap_page);
  at->second.erase(gpu_address() + page * page_bytes_);
  if (at->second.empty()) {
    places.erase(at);
  }
  pages.erase(found);
  addresses_->unmap(page * page_bytes_, page_bytes_);
}

std::vector<Touched> touched_by(const Access& access, const std::string& who) {
  std::vector<Touched> touched;
  const auto& all = Machine::current().addresses;
  auto after = all.upper_bound(access.address);
  Buffer* const buffer = after == all.begin() ? nullptr : std::prev(after)->second;
  if (buffer == nullptr || access.address - buffer->gpu_address() >= buffer->length()) {
    report(who + " uses an address that is no buffer's");
    return touched;
  }
  const uint64_t offset = access.address - buffer->gpu_address();
  if (access.bytes > buffer->length() - offset) {
    report(who + " goes beyond the end of a buffer");
    return touched;
  }
  const uint64_t size = buffer->sparse() ? buffer->page_bytes() : kPlainPage;
  for (uint64_t page = offset / size; page * size < offset + access.bytes; ++page) {
    if (!buffer->sparse()) {
      touched.push_back({buffer, page, buffer, page, access.write});
      continue;
    }
    const auto found = buffer->pages.find(page);
    if (found == buffer->pages.end()) {
      report(who + " uses " + page_name(page) + " of a sparse buffer, which is not mapped");
      continue;
    }
    const Buffer::Page& place = found->second;
    if (place.leaving) {
      report(who + " uses " + page_name(page) + " of a sparse buffer, whose unmap is queued");
    }
    if (place.event == nullptr || place.event->seen() < place.value) {
      report(
          who + " uses " + page_name(page) +
          " of a sparse buffer, whose mapping the host has not seen complete");
    }
    touched.push_back({buffer, page, place.heap, place.heap_page, access.write});
  }
  return touched;
}

}  // namespace quire::fake
