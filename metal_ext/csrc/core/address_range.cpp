#include "core/address_range.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/checked.h"
#include "core/posix_memory.h"

// Implements a sequence's address range: checks, the record of mapped blocks, and system calls.
namespace quire {
namespace {

// Memory is unmapped and zeroed in pieces of these sizes. The system holds a lock on the process's
// memory during each piece, and other threads wait for it.
constexpr size_t kUnmapPieceBytes = size_t{64} << 20;
constexpr size_t kCommitPieceBytes = size_t{1} << 20;

// Calls body(first, bytes) for pieces of all regions' slots. A piece has at most piece_bytes bytes.
template <class SlotRuns, class Body>
void in_pieces(
    const AddressRange& range, const SlotRuns& runs, size_t piece_bytes, const Body& body) {
  for (size_t region = 0; region < range.geometry().regions(); ++region) {
    const size_t block_bytes = range.geometry().region_block_bytes(region);
    for (const auto& run : runs) {
      std::byte* piece = range.region(region) + run.slot * block_bytes;
      std::byte* const end = piece + run.count * block_bytes;
      for (; piece < end; piece += piece_bytes) {
        body(piece, std::min(piece_bytes, static_cast<size_t>(end - piece)));
      }
    }
  }
}

}  // namespace

void AddressRange::check_each(size_t block, size_t count, bool mapped) const {
  const std::lock_guard lock(mutex_);
  for (size_t b = block; b < block + count; ++b) {
    require<std::logic_error>((access_[b] != Access::none) == mapped, "block ", b,
                              mapped ? " is not mapped" : " is mapped already");
  }
}

void AddressRange::set(size_t block, size_t count, Access access) {
  const std::lock_guard lock(mutex_);
  std::fill_n(access_.begin() + static_cast<ptrdiff_t>(block), count, access);
  if (access == Access::none) {
    mapped_prefix_ = std::min(mapped_prefix_, block);
  }
  while (mapped_prefix_ < access_.size() && access_[mapped_prefix_] != Access::none) {
    ++mapped_prefix_;
  }
}

std::vector<AddressRange::SlotRun> AddressRange::slot_runs(size_t block, size_t count) const {
  const size_t ring = geometry_.ring_blocks();
  const size_t first = slot(block);
  std::vector<SlotRun> runs{{0, first, count}};
  if (ring > 0) {
    const size_t before_end = std::min(count, ring - first);
    runs.push_back({0, first + ring, before_end});
    if (before_end < count) {
      runs.push_back({before_end, 0, count - before_end});
    }
  }
  return runs;
}

void AddressRange::take_slots(size_t block, size_t count) {
  const std::lock_guard lock(mutex_);
  if (slots_.empty()) {
    return;
  }
  const size_t ring = geometry_.ring_blocks();
  const auto has_slot = [](uint32_t slot) { return slot != kNoSlot; };
  const auto oldest = std::ranges::find_if(slots_, has_slot);
  size_t next = 0;
  size_t taken = 0;
  if (oldest != slots_.end()) {
    const auto newest = std::find_if(slots_.rbegin(), slots_.rend(), has_slot);
    require<std::logic_error>(newest.base() <= slots_.begin() + static_cast<ptrdiff_t>(block),
                              "block ", block, " lies before a mapped block of a ring");
    next = *newest + 1;
    taken = (*newest + ring - *oldest) % ring + 1;
  }
  require<std::logic_error>(
      taken + count <= ring, count, " blocks do not fit beside ", taken, " in a ring of ", ring);
  for (size_t i = 0; i < count; ++i) {
    slots_[block + i] = narrowed<uint32_t>("slot", (next + i) % ring);
  }
}

void AddressRange::free_slots(size_t block, size_t count) {
  const std::lock_guard lock(mutex_);
  if (!slots_.empty()) {
    std::fill_n(slots_.begin() + static_cast<ptrdiff_t>(block), count, kNoSlot);
  }
}

void AddressRange::check_map(
    const Heap& heap, int64_t heap_block, int64_t block, int64_t count) const {
  checked_run("range blocks", block, count, geometry_.blocks_per_range());
  checked_run("heap blocks", heap_block, count, geometry_.blocks_per_heap());
  require<std::invalid_argument>(
      heap.geometry() == geometry_, "the heap and the range have different geometries");
}

void AddressRange::map(
    const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count,
    bool writable) {
  check_map(*heap, heap_block, block, count);
  const auto first = static_cast<size_t>(block);
  const auto blocks = static_cast<size_t>(count);
  const std::lock_guard changing(changing_);
  check_each(first, blocks, false);
  take_slots(first, blocks);
  try {
    if (map_memory(heap, static_cast<size_t>(heap_block), first, blocks, writable)) {
      count_mapped(first, blocks, writable);
    }
  } catch (...) {
    free_slots(first, blocks);
    throw;
  }
}

void AddressRange::map_committed(
    const std::shared_ptr<Heap>& heap, int64_t heap_block, int64_t block, int64_t count) {
  map(heap, heap_block, block, count, true);
  commit_memory(static_cast<size_t>(block), static_cast<size_t>(count));
}

void AddressRange::unmap(int64_t block, int64_t count) {
  checked_run("range blocks", block, count, geometry_.blocks_per_range());
  const auto first = static_cast<size_t>(block);
  const auto blocks = static_cast<size_t>(count);
  prepare_unmap();
  const std::lock_guard changing(changing_);
  check_each(first, blocks, true);
  set(first, blocks, Access::none);  // before unmap_memory(), so that no row uses the memory
  unmap_memory(first, blocks);
  free_slots(first, blocks);
}

uint32_t AddressRange::move_block(
    Direction direction, int64_t block, int64_t fd, int64_t offset) {
  checked_run("range blocks", block, 1, geometry_.blocks_per_range());
  const FilePlace place(fd, offset, geometry_.block_bytes());
  const auto number = static_cast<size_t>(block);
  check_each(number, 1, true);
  require<std::logic_error>(
      direction == Direction::to_file || !first_read_only(number * geometry_.tokens_per_block(), 1),
      "block ", block, " is read-only");
  return move_memory(direction, number, place);
}

size_t AddressRange::mapped_tokens() const {
  const std::lock_guard lock(mutex_);
  return mapped_prefix_ * geometry_.tokens_per_block();
}

AddressRange::MappedRun AddressRange::mapped_run(size_t token) const {
  const size_t tokens = geometry_.tokens_per_block();
  const size_t block = token / tokens;
  const std::lock_guard lock(mutex_);
  if (block < mapped_prefix_) {
    return {0, mapped_prefix_ * tokens, static_cast<int64_t>(slot(0) * tokens)};
  }
  if (block >= access_.size() || access_[block] == Access::none) {
    return {mapped_prefix_ * tokens, mapped_prefix_ * tokens, 0};
  }
  size_t first = block;
  size_t end = block + 1;
  while (access_[first - 1] != Access::none) {  // the block at mapped_prefix_ is unmapped
    --first;
  }
  while (end < access_.size() && access_[end] != Access::none) {
    ++end;
  }
  const auto shift = static_cast<int64_t>(slot(first)) - static_cast<int64_t>(first);
  return {first * tokens, end * tokens, shift * static_cast<int64_t>(tokens)};
}

std::optional<size_t> AddressRange::first_read_only(size_t start, size_t count) const {
  const size_t tokens = geometry_.tokens_per_block();
  const size_t last = (start + count - 1) / tokens;
  const std::lock_guard lock(mutex_);
  for (size_t block = start / tokens; block <= last; ++block) {
    if (access_[block] == Access::read_only) {
      return block;
    }
  }
  return std::nullopt;
}

void require_one_block(const Geometry& geometry) {
  require<std::invalid_argument>(
      geometry.blocks_per_range() == 1 && geometry.blocks_per_heap() == 1,
      "a dense range is one block, and so is its heap");
}

void require_dense_writable(bool writable) {
  require<std::invalid_argument>(
      writable, "a dense range shares nothing, so that it is always writable");
}

uint32_t HostRange::move_memory(Direction direction, size_t block, const FilePlace& place) {
  std::vector<iovec> pieces;
  for (size_t r = 0; r < geometry().regions(); ++r) {
    const size_t bytes = geometry().region_block_bytes(r);
    pieces.push_back({region(r) + slot(block) * bytes, bytes});
  }
  return move_record(direction, std::move(pieces), place);
}

SparseRange::SparseRange(const Geometry& geometry)
    : HostRange(geometry), base_(reserve_addresses(geometry.range_bytes())) {}

SparseRange::~SparseRange() {
  release_addresses(base_, geometry().range_bytes());
}

bool SparseRange::map_memory(
    const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
    bool writable) {
  const auto* shared = dynamic_cast<const SharedHeap*>(heap.get());
  require<std::invalid_argument>(
      shared != nullptr, "a sparse range takes blocks of shared heaps only");
  spare_ = spare_ || make_spare(base_);
  if (!spare_) {  // without the spare page a map might not be undone
    throw std::system_error(ENOMEM, std::generic_category(), "making a spare mapping");
  }
  const Geometry& shape = geometry();
  const std::vector<SlotRun> runs = slot_runs(block, count);
  try {
    for (size_t r = 0; r < shape.regions(); ++r) {
      const size_t bytes = shape.region_block_bytes(r);
      const size_t offset = shape.heap_region_offset(r) + heap_block * bytes;
      for (const SlotRun& run : runs) {
        shared->map(region(r) + run.slot * bytes, run.count * bytes, offset + run.skipped * bytes,
                    writable);
      }
    }
  } catch (const std::system_error&) {
    unmap_memory(block, count);
    throw;
  }
  return true;
}

void SparseRange::commit_memory(size_t block, size_t count) {
  in_pieces(*this, slot_runs(block, count), kCommitPieceBytes, &populate);
}

void SparseRange::unmap_memory(size_t block, size_t count) {
  in_pieces(*this, slot_runs(block, count), kUnmapPieceBytes,
            [this](std::byte* first, size_t bytes) { clear(first, bytes); });
}

void SparseRange::clear(std::byte* first, size_t bytes) {
  try {
    map_nothing(first, bytes);
    return;
  } catch (const std::system_error&) {  // tried again below, without the spare page
  }
  try {
    if (spare_) {
      give_up_spare(base_);
      spare_ = false;
    }
    map_nothing(first, bytes);
    spare_ = make_spare(base_);
  } catch (const std::system_error& error) {
    // This is no std::system_error, because callers take that to mean that no mapping changed.
    throw std::runtime_error(message("memory that must go stays mapped: ", error.what()));
  }
}

DenseRange::DenseRange(const Geometry& geometry) : HostRange(geometry) {
  require_one_block(geometry);
}

std::byte* DenseRange::base() const {
  return heap_ == nullptr ? nullptr : static_cast<DenseHeap&>(*heap_).memory();
}

bool DenseRange::map_memory(
    const std::shared_ptr<Heap>& heap, size_t, size_t, size_t, bool writable) {
  require_dense_writable(writable);
  auto* const dense = dynamic_cast<DenseHeap*>(heap.get());
  require<std::invalid_argument>(dense != nullptr, "a dense range takes a dense heap only");
  dense->memory();  // commits the memory, or throws
  heap_ = heap;
  return true;
}

void DenseRange::unmap_memory(size_t, size_t) {
  heap_ = nullptr;
}

}  // namespace quire
