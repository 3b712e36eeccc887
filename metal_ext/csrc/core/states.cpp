#include "core/states.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include "core/checked.h"
#include "core/posix_memory.h"

// Implements the memory of state slots, and the division of a step's rows into tiles and runs.
namespace quire {

namespace {

size_t whole_pages(int64_t bytes) {
  const size_t page = system_page_bytes();
  const size_t least = checked_between("bytes", bytes, 1, StateMemory::kMaxBytes);
  return (least + page - 1) / page * page;
}

}  // namespace

// The page after the memory stays reserved, so that a write past the end raises SIGSEGV.
StateMemory::StateMemory(int64_t bytes)
    : bytes_(whole_pages(bytes)), address_(reserve_addresses(bytes_ + system_page_bytes())) {
  try {
    map_private_zeros(address_, bytes_);
  } catch (const std::system_error&) {
    release_addresses(address_, bytes_ + system_page_bytes());
    throw;
  }
}

StateMemory::~StateMemory() {
  release_addresses(address_, bytes_ + system_page_bytes());
}

std::byte* StateMemory::pages_at(int64_t offset, int64_t bytes) const {
  checked_run("bytes of the memory", offset, bytes, bytes_);
  const auto page = static_cast<int64_t>(system_page_bytes());
  require<std::invalid_argument>(
      offset % page == 0 && bytes % page == 0, "[", offset, ", ", offset, " + ", bytes,
      ") is not in whole pages of ", page, " bytes");
  return address_ + offset;
}

void StateMemory::release(int64_t offset, int64_t bytes) {
  give_back_private(pages_at(offset, bytes), static_cast<size_t>(bytes));
}

size_t StateMemory::committed(int64_t offset, int64_t bytes) const {
  return private_committed(pages_at(offset, bytes), static_cast<size_t>(bytes));
}

uint32_t StateMemory::move(
    Direction direction, int64_t offset, int64_t bytes, int64_t fd, int64_t file_offset) const {
  checked_run("bytes of the memory", offset, bytes, bytes_);
  const auto count = static_cast<size_t>(bytes);
  return move_record(direction, {{address_ + offset, count}}, FilePlace(fd, file_offset, count));
}

StateRows::StateRows(
    const std::vector<StateSegment>& segments, std::vector<std::shared_ptr<StateMemory>> memories)
    : memories_(std::move(memories)), room_(StateMemory::kMaxBytes) {
  require<std::invalid_argument>(!segments.empty(), "rows of states need at least one segment");
  for (const StateSegment& segment : segments) {
    add(segment);
  }
}

void StateRows::require_room(int64_t offset, size_t bytes) const {
  checked_run("bytes of a slot", offset, narrowed<int64_t>("bytes of a state", bytes), room_);
}

std::byte* StateRows::slot(int64_t address) {
  for (const auto& memory : memories_) {
    const auto base = reinterpret_cast<uintptr_t>(memory->address());
    const auto at = static_cast<uintptr_t>(address);
    if (at >= base && at - base < memory->bytes() && at % sizeof(float) == 0) {
      room_ = std::min(room_, memory->bytes() - (at - base));
      return memory->address() + (at - base);
    }
  }
  throw std::out_of_range(message(
      "address is ", address, "; it must be a multiple of 4 inside one of the memories"));
}

void StateRows::add(const StateSegment& segment) {
  checked_between("count", segment.count, 1, kMaxRows - static_cast<int64_t>(rows_));
  require<std::invalid_argument>(!segment.writes.empty(), "a segment needs a write");
  const int64_t drafts = segment.count - segment.writes.back().rows;
  if (drafts > 0) {
    // The last write may replace the tail that the drafts' convolution reads. A tile convolves all
    // rows before it writes.
    require<std::invalid_argument>(segment.count <= int64_t{kTileRows}, segment.count,
                                   " rows with drafts; ", kTileRows, " at most");
    if (room_in_tile() < static_cast<size_t>(segment.count)) {
      tiles_.push_back({rows_, 0, {}});
    }
  }
  const size_t segment_first = rows_;
  const std::byte* const read = segment.read == 0 ? nullptr : slot(segment.read);
  const std::byte* from = read;
  int64_t done = 0;
  for (const StateWrite& write : segment.writes) {
    checked_between("rows", write.rows, done + 1, segment.count);
    std::byte* const to = slot(write.address);
    while (done < write.rows) {
      const auto left = static_cast<size_t>(write.rows - done);
      const size_t count = std::min(left, room_in_tile());
      add_run(segment_first, read, {rows_, count, from, to, count == left});
      from = to;
      rows_ += count;
      done += static_cast<int64_t>(count);
    }
  }
  if (drafts > 0) {
    add_run(segment_first, read, {rows_, static_cast<size_t>(drafts), from, nullptr, false});
    rows_ += static_cast<size_t>(drafts);
  }
}

size_t StateRows::room_in_tile() const {
  const bool full = tiles_.empty() || tiles_.back().count == kTileRows;
  return full ? kTileRows : kTileRows - tiles_.back().count;
}

void StateRows::add_run(size_t segment_first, const std::byte* read, const Run& run) {
  if (tiles_.empty() || tiles_.back().count + run.count > kTileRows) {
    tiles_.push_back({run.first, 0, {}});
  }
  Tile& tile = tiles_.back();
  if (tile.parts.empty() || tile.parts.back().segment_first != segment_first) {
    tile.parts.push_back({segment_first, read, run.first, 0, {}});
  }
  tile.count += run.count;
  tile.parts.back().count += run.count;
  tile.parts.back().runs.push_back(run);
}

}  // namespace quire
