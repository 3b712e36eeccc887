#include "core/metal/cells.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

#include "core/checked.h"

// Implements the buffers of recurrent states, and the checks of a step's reads and writes in them.
namespace quire::metal {
namespace {

constexpr size_t kAlignment = 16;

// The number of cells in a buffer: as many as fit into a residency set, or all cells on dense.
size_t per_buffer(const Context& context, size_t count, size_t cell_bytes, size_t most) {
  if (cell_bytes == 0 || cell_bytes % kAlignment != 0) {
    throw std::invalid_argument(
        "a cell has " + std::to_string(cell_bytes) + " bytes; it must be a multiple of 16");
  }
  const bool together = context.kind == Kind::dense;
  const size_t needed = together ? count : 1;
  if (needed > most / cell_bytes) {
    throw std::runtime_error(
        std::to_string(needed) + " cells of " + std::to_string(cell_bytes) +
        " bytes lie in one buffer, but a buffer has " + std::to_string(most) +
        " at most; fewer sequences are needed");
  }
  const size_t set = context.residency.set_bytes();
  const size_t wanted = together || set == 0 ? count : set / cell_bytes;
  return std::clamp<size_t>(wanted, 1, most / cell_bytes);
}

std::string name_of_cell(size_t cell) { return "cell " + std::to_string(cell); }

}  // namespace

Cells::Cells(Context& context, size_t count, size_t cell_bytes, size_t most)
    : context_(context),
      cell_bytes_(cell_bytes),
      cells_per_buffer_(per_buffer(context, count, cell_bytes, most)),
      uses_(count) {
  for (size_t left = count; left > 0;) {
    const size_t cells = std::min(left, cells_per_buffer_);
    buffers_.push_back(make_shared_buffer(context.device.get(), cells * cell_bytes));
    left -= cells;
  }
  for (const auto& buffer : buffers_) {
    context.residency.add(buffer.get(), buffer->length());
  }
}

uint64_t Cells::place(size_t cell) const {
  const uint64_t offset = cell % cells_per_buffer_ * cell_bytes_;
  return arena() != nullptr ? offset
                            : buffers_[cell / cells_per_buffer_]->gpuAddress() + offset;
}

MTL::Buffer* Cells::arena() const {
  return context_.kind == Kind::dense ? buffers_.front().get() : nullptr;
}

void Cells::check(const CellSegment& segment) const {
  const auto require = [this](size_t cell) {
    if (cell >= count()) {
      throw std::out_of_range(name_of_cell(cell) + " of " + std::to_string(count()));
    }
  };
  if (segment.read) {
    require(*segment.read);
  }
  size_t rows = 0;
  for (const CellSegment::Write& write : segment.writes) {
    require(write.cell);
    if (write.rows <= rows || write.rows > segment.count) {
      throw std::invalid_argument(
          "the writes of a segment must ascend to all of its " + std::to_string(segment.count) +
          " rows");
    }
    rows = write.rows;
  }
  if (rows == 0 || rows != segment.count) {
    throw std::invalid_argument(
        "the last write of a segment must be after all of its " + std::to_string(segment.count) +
        " rows");
  }
}

void Cells::check_use(
    uint64_t epoch, const CellSegment& segment, const std::map<size_t, size_t>& readers) const {
  if (segment.read && uses_[*segment.read].written == 0) {
    throw std::logic_error(
        name_of_cell(*segment.read) + " is read by epoch " + std::to_string(epoch) +
        ", and nothing has written it");
  }
  const uint64_t completed = context_.epochs.completed();
  for (const CellSegment::Write& write : segment.writes) {
    const bool goes_on = segment.read == write.cell;
    const auto reading = readers.find(write.cell);
    if (reading != readers.end() && reading->second > (goes_on ? 1 : 0)) {
      throw std::logic_error(
          name_of_cell(write.cell) + " is written by epoch " + std::to_string(epoch) +
          ", in which others read it");
    }
    const Use& use = uses_[write.cell];
    const uint64_t newest = goes_on ? use.read : std::max(use.read, use.written);
    if (newest > completed) {
      throw std::logic_error(
          name_of_cell(write.cell) + " is written by epoch " + std::to_string(epoch) +
          ", while epoch " + std::to_string(newest) + " may touch it");
    }
  }
}

void Cells::use(uint64_t epoch, const std::vector<CellSegment>& segments) {
  std::map<size_t, size_t> readers;
  std::set<size_t> written;
  for (const CellSegment& segment : segments) {
    check(segment);
    if (segment.read) {
      ++readers[*segment.read];
    }
    for (const CellSegment::Write& write : segment.writes) {
      if (!written.insert(write.cell).second) {
        throw std::logic_error(
            name_of_cell(write.cell) + " is written twice by epoch " + std::to_string(epoch));
      }
    }
  }
  for (const CellSegment& segment : segments) {
    check_use(epoch, segment, readers);
  }
  for (const auto& [cell, _] : readers) {
    if (!written.contains(cell)) {
      uses_[cell].read = epoch;
    }
  }
  for (const size_t cell : written) {
    uses_[cell].written = epoch;
  }
}

}  // namespace quire::metal
