#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/records.h"

// State slots: each holds the states of all recurrent layers of one sequence at one position. This
// file defines the slots' memory, and divides a step's rows where slots are read or written.
namespace quire {

// The memory of state slots, which holds zeros at first, and is committed by the first write.
class StateMemory {
 public:
  static constexpr int64_t kMaxBytes = int64_t{1} << 46;

  // Rounds `bytes` up to whole pages. Throws std::out_of_range or std::system_error.
  explicit StateMemory(int64_t bytes);
  ~StateMemory();
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;

  std::byte* address() const { return address_; }
  size_t bytes() const { return bytes_; }

  // Gives whole pages back to the system. Later reads give zeros. Throws std::invalid_argument if
  // the bytes are not whole pages.
  void release(int64_t offset, int64_t bytes);
  size_t committed(int64_t offset, int64_t bytes) const;
  // Moves bytes of this memory to or from a file, as AddressRange::move_block() does.
  uint32_t move(
      Direction direction, int64_t offset, int64_t bytes, int64_t fd, int64_t file_offset) const;

 private:
  std::byte* pages_at(int64_t offset, int64_t bytes) const;

  size_t bytes_;
  std::byte* address_;
};

// A request to fill the slot at `address` with the state after a segment's first `rows` rows.
struct StateWrite {
  int64_t rows;
  int64_t address;
};

// Consecutive rows of one sequence. `read` is the address of the slot that holds the state
// before these rows, or 0 if that state is all zeros. The state after the rows that follow the last
// write (drafts) is not kept.
struct StateSegment {
  int64_t count;
  int64_t read;
  std::vector<StateWrite> writes;  // ascending by rows; at least one
};

// A step's rows, with the state slots that the rows read and write. All recurrent layers share one
// object. A tile has up to 64 rows; a segment with drafts is within one. A run ends where a segment
// or a tile ends, or at a write to a slot:
//   rows      | segment 0              | segment 1 ........................ |
//   tiles     | tile 0 ................ | tile 1 ......... | tile 2 ....... |
//   runs      | run       | run         | run      | run   | run            |
//                         ^ a write inside a tile  ^
class StateRows {
 public:
  static constexpr size_t kTileRows = 64;
  static constexpr int64_t kMaxRows = int64_t{1} << 24;

  // Rows whose state is read from one slot, and written to another slot after the last row.
  struct Run {
    size_t first;  // index among all rows
    size_t count;
    const std::byte* from;  // null for a state of zeros
    std::byte* to;  // null if the state is not kept
    bool written;  // whether a StateWrite, not only the next run, needs `to`
  };
  // The rows of one segment in a tile.
  struct Part {
    size_t segment_first;  // index of the segment's first row among all rows
    const std::byte* read;  // the slot that the segment reads; null for zeros
    size_t first;
    size_t count;
    std::vector<Run> runs;
  };
  struct Tile {
    size_t first;
    size_t count;
    std::vector<Part> parts;
  };

  // Keeps `memories`, which hold all slots, alive. Throws std::out_of_range for slots outside them
  // or writes that do not ascend, std::invalid_argument for a segment without a write, or for
  // more than kTileRows rows with drafts.
  StateRows(
      const std::vector<StateSegment>& segments,
      std::vector<std::shared_ptr<StateMemory>> memories);

  size_t size() const { return rows_; }
  const std::vector<Tile>& tiles() const { return tiles_; }

  // Throws std::out_of_range unless every slot has `bytes` bytes after the offset.
  void require_room(int64_t offset, size_t bytes) const;

 private:
  std::byte* slot(int64_t address);
  void add(const StateSegment& segment);
  void add_run(size_t segment_first, const std::byte* read, const Run& run);
  size_t room_in_tile() const;

  std::vector<std::shared_ptr<StateMemory>> memories_;
  size_t room_;  // the least number of bytes from a slot to the end of its memory
  size_t rows_ = 0;
  std::vector<Tile> tiles_;
};

}  // namespace quire
