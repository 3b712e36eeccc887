#include "core/metal/slots.h"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "core/checked.h"

// Implements the buffers of state slots, and the checks of a step's reads and writes.
namespace quire::metal {
namespace {

constexpr size_t kAlignment = 16;

// Returns how many slots a buffer has: on the dense kind all, else as many as fit a residency set.
size_t per_buffer(const Context& context, size_t count, size_t slot_bytes, size_t most) {
  require<std::invalid_argument>(
      slot_bytes > 0 && slot_bytes % kAlignment == 0, "a slot has ", slot_bytes,
      " bytes; it must be a multiple of 16");
  const bool together = context.kind == Kind::dense;
  const size_t needed = together ? count : 1;
  require<std::runtime_error>(
      needed <= most / slot_bytes, needed, " slots of ", slot_bytes,
      " bytes lie in one buffer, but a buffer has ", most, " at most; fewer sequences are needed");
  const size_t set = context.residency.set_bytes();
  const size_t wanted = together || set == 0 ? count : set / slot_bytes;
  return std::clamp<size_t>(wanted, 1, most / slot_bytes);
}

}  // namespace

Slots::Slots(Context& context, size_t count, size_t slot_bytes, size_t most)
    : context_(context),
      slot_bytes_(slot_bytes),
      slots_per_buffer_(per_buffer(context, count, slot_bytes, most)),
      buffers_((count + slots_per_buffer_ - 1) / slots_per_buffer_),
      uses_(count) {}

void Slots::commit(size_t slot) {
  require_slot(slot);
  auto& buffer = buffers_[slot / slots_per_buffer_];
  if (!buffer) {
    const size_t first = slot - slot % slots_per_buffer_;
    const size_t slots = std::min(slots_per_buffer_, count() - first);
    buffer = make_shared_buffer(context_.device.get(), slots * slot_bytes_);
    context_.residency.add(buffer.get(), buffer->length());
    committed_bytes_ += buffer->length();
  }
}

uint64_t Slots::place(size_t slot) const {
  const uint64_t offset = slot % slots_per_buffer_ * slot_bytes_;
  return arena() != nullptr ? offset
                            : buffers_[slot / slots_per_buffer_]->gpuAddress() + offset;
}

MTL::Buffer* Slots::arena() const {
  return context_.kind == Kind::dense ? buffers_.front().get() : nullptr;
}

void Slots::require_slot(size_t slot) const {
  require<std::out_of_range>(slot < count(), "slot ", slot, " of ", count());
}

void Slots::require_memory(size_t slot) const {
  require_slot(slot);
  require<std::logic_error>(static_cast<bool>(buffers_[slot / slots_per_buffer_]), "slot ", slot,
                            " has no memory");
}

uint32_t Slots::move(Direction direction, size_t slot, int64_t fd, int64_t offset) {
  require_memory(slot);
  auto* const first = static_cast<std::byte*>(buffers_[slot / slots_per_buffer_]->contents()) +
                      slot % slots_per_buffer_ * slot_bytes_;
  const FilePlace place(fd, offset, slot_bytes_);
  const uint32_t sum = move_record(direction, {{first, slot_bytes_}}, place);
  uses_[slot].filled |= direction == Direction::from_file;
  return sum;
}

void Slots::check(const SlotSegment& segment) const {
  if (segment.read) {
    require_memory(*segment.read);
  }
  size_t rows = 0;
  for (const SlotSegment::Write& write : segment.writes) {
    require_memory(write.slot);
    require<std::invalid_argument>(
        rows < write.rows && write.rows <= segment.count,
        "the writes of a segment must ascend within its ", segment.count, " rows");
    rows = write.rows;
  }
  require<std::invalid_argument>(rows > 0, "a segment needs a write");
}

void Slots::check_use(
    uint64_t epoch, const SlotSegment& segment, const std::map<size_t, size_t>& readers) const {
  const Use read = segment.read ? uses_[*segment.read] : Use{.filled = true};
  require<std::logic_error>(
      read.filled || read.written > 0, "slot ", segment.read.value_or(0), " is read by epoch ",
      epoch, ", and nothing has written it");
  const uint64_t completed = context_.epochs.completed();
  for (const SlotSegment::Write& write : segment.writes) {
    const bool goes_on = segment.read == write.slot;
    const auto reading = readers.find(write.slot);
    require<std::logic_error>(
        reading == readers.end() || reading->second <= (goes_on ? 1 : 0), "slot ", write.slot,
        " is written by epoch ", epoch, ", in which others read it");
    const Use& use = uses_[write.slot];
    const uint64_t newest = goes_on ? use.read : std::max(use.read, use.written);
    require<std::logic_error>(
        newest <= completed, "slot ", write.slot, " is written by epoch ", epoch,
        ", while epoch ", newest, " may touch it");
  }
}

void Slots::use(uint64_t epoch, const std::vector<SlotSegment>& segments) {
  std::map<size_t, size_t> readers;
  std::set<size_t> written;
  for (const SlotSegment& segment : segments) {
    check(segment);
    if (segment.read) {
      ++readers[*segment.read];
    }
    for (const SlotSegment::Write& write : segment.writes) {
      require<std::logic_error>(written.insert(write.slot).second, "slot ", write.slot,
                                " is written twice by epoch ", epoch);
    }
  }
  for (const SlotSegment& segment : segments) {
    check_use(epoch, segment, readers);
  }
  for (const auto& [slot, _] : readers) {
    if (!written.contains(slot)) {
      uses_[slot].read = epoch;
    }
  }
  for (const size_t slot : written) {
    uses_[slot].written = epoch;
  }
}

}  // namespace quire::metal
