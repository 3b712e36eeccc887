#include "core/metal/device_range.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include "core/checked.h"

// Implements the rules of mapping, use and copying for all kinds of GPU memory.
namespace quire::metal {

void DeviceRange::enter(const Run& run) {
  const std::lock_guard books(context_->books);
  context_->require_running();
  for (size_t b = run.block; b < run.block + run.count; ++b) {
    require<std::logic_error>(
        places_[b].heap == nullptr, "block ", b, " is about to be mapped already");
  }
  BlockLedger& ledger = run.heap->ledger();
  if (run.writable) {
    ledger.map_writable(run.heap_block, run.count, this);
  } else {
    ledger.map_read_only(run.heap_block, run.count, context_->epochs.completed());
  }
  for (size_t i = 0; i < run.count; ++i) {
    places_[run.block + i] = {run.heap, run.heap_block + i};
  }
}

void DeviceRange::leave(size_t block, size_t count) {
  const std::lock_guard books(context_->books);
  for (size_t b = block; b < block + count; ++b) {
    places_[b].heap->ledger().unmap(places_[b].block, this);
    places_[b] = {};
  }
}

void DeviceRange::withdraw(const Run& run) {
  if (!run.writable) {
    leave(run.block, run.count);
    return;
  }
  const std::lock_guard books(context_->books);
  run.heap->ledger().withdraw(run.heap_block, run.count);
  std::fill_n(places_.begin() + static_cast<ptrdiff_t>(run.block), run.count, Place{});
}

void DeviceRange::observe(const Run& run) {
  {
    const std::lock_guard books(context_->books);
    for (size_t b = run.block; b < run.block + run.count; ++b) {
      places_[b].observed = true;
    }
  }
  count_mapped(run.block, run.count, run.writable);
}

bool DeviceRange::map_memory(
    const std::shared_ptr<Heap>& heap, size_t heap_block, size_t block, size_t count,
    bool writable) {
  const std::shared_ptr<DeviceHeap> device_heap(heap, &context_->own(*heap));
  if (context_->kind == Kind::dense) {
    require_dense_writable(writable);
  }
  context_->health.require();
  const auto point = context_->mapping_point("blocks cannot be mapped");
  const Run run{device_heap, heap_block, block, count, writable};
  enter(run);
  try {
    device_heap->commit();
    context_->settle();
  } catch (const std::system_error&) {
    withdraw(run);
    throw;
  }
  if (attach(run)) {
    observe(run);
  }
  return false;  // observe() counts the blocks, now or later
}

void DeviceRange::prepare_unmap() {
  context_->mapping_point("blocks cannot be unmapped");
}

void DeviceRange::unmap_memory(size_t block, size_t count) {
  context_->health.require();
  const auto point = context_->mapping_point("blocks cannot be unmapped");
  uint64_t last_used;
  {
    // The blocks already count as unmapped, so use() refuses new steps. last_used_ is the epoch of
    // the newest earlier step.
    const std::lock_guard books(context_->books);
    last_used = last_used_;
  }
  // Rule: a block is unmapped only after every step that may use it has completed.
  context_->wait_for(last_used, "blocks are unmapped");
  detach(block, count);
  leave(block, count);
}

void DeviceRange::use(uint64_t epoch, size_t start, size_t count) {
  note_use(epoch, start, count);
  context_->residency.begin_step();
}

void DeviceRange::note_use(uint64_t epoch, size_t start, size_t count) {
  const size_t tokens = geometry().tokens_per_block();
  const size_t first = start / tokens;
  const size_t end = count == 0 ? first : (start + count - 1) / tokens + 1;
  context_->health.require();
  const std::lock_guard books(context_->books);
  context_->require_running();
  require<std::logic_error>(
      epoch <= context_->epochs.newest() && epoch > context_->epochs.completed(), "epoch ", epoch,
      " is not in flight");
  // Rule: a step uses only rows whose mapping is complete.
  const MappedRun mapped = mapped_run(start);
  require<std::logic_error>(
      start + count <= mapped.end, "a step cannot use tokens up to ", start + count, ": ",
      mapped.end, " are mapped");
  // Rule: no step reads at other addresses of a ring what a step in flight writes.
  require<std::logic_error>(mapped.shift == shift_ || last_used_ <= context_->epochs.completed(),
                            "a step in flight uses other addresses of the range");
  shift_ = mapped.shift;
  for (size_t b = first; b < end; ++b) {
    places_[b].heap->ledger().require_writable(places_[b].block, this);
  }
  for (size_t b = first; b < end; ++b) {
    places_[b].heap->ledger().write(places_[b].block, this, epoch);
  }
  last_used_ = std::max(last_used_, epoch);
}

void DeviceRange::copy_from(
    DeviceRange& source, size_t source_block, size_t block, size_t tokens) {
  context_->health.require();
  uint64_t last_used;
  {
    const std::lock_guard books(context_->books);
    context_->require_running();
    const Place& from = source.places_.at(source_block);
    const Place& to = places_.at(block);
    require<std::logic_error>(
        from.observed && to.observed, "a block without memory cannot be copied");
    require<std::logic_error>(tokens >= 1 && tokens <= geometry().tokens_per_block(), tokens,
                              " tokens of a block cannot be copied");
    to.heap->ledger().require_writable(to.block, this);
    last_used = std::max(from.heap->ledger().written_epoch(from.block), last_used_);
  }
  context_->wait_for(last_used, "a block is copied");
  context_->residency.refresh();
  copy(source, source_block, block, tokens);
}

uint32_t DeviceRange::move_memory(Direction direction, size_t block, const FilePlace& file) {
  context_->health.require();
  Place at;
  {
    const std::lock_guard books(context_->books);
    context_->require_running();
    at = places_[block];
    BlockLedger& ledger = at.heap->ledger();
    if (direction == Direction::from_file) {
      ledger.require_writable(at.block, this);
    }
    const uint64_t epoch = ledger.written_epoch(at.block);
    require<std::logic_error>(
        epoch <= context_->epochs.completed(), "block ", block, " cannot be moved: epoch ", epoch,
        ", which writes it, is not complete");
  }
  return move_place(direction, at, block, file);
}

uint32_t DeviceRange::move_place(
    Direction direction, const Place& at, size_t, const FilePlace& file) {
  std::vector<iovec> pieces;
  for (size_t region = 0; region < geometry().regions(); ++region) {
    pieces.push_back({contents(at, region), geometry().region_block_bytes(region)});
  }
  return move_record(direction, std::move(pieces), file);
}

std::byte* DeviceRange::contents(const Place&, size_t) const {
  throw std::logic_error("the CPU cannot access this kind of memory");
}

void DeviceRange::unmap_all() {
  size_t block = 0;
  while (block < places_.size()) {
    size_t end = block;
    while (end < places_.size() && places_[end].heap != nullptr) {
      ++end;
    }
    if (end > block) {
      unmap(static_cast<int64_t>(block), static_cast<int64_t>(end - block));
    }
    block = end + 1;
  }
}

BufferPlace DeviceRange::view(size_t) const {
  throw std::logic_error("a region of this kind of backend is not contiguous");
}

std::vector<uint64_t> DeviceRange::page_addresses(size_t) const {
  throw std::logic_error("only the paged backend has a page table");
}

}  // namespace quire::metal
