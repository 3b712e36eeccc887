#include "core/metal/slots.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

#include "core/checked.h"

// Implements the buffers of state slots, and the checks of a step's reads and writes.
namespace quire::metal {
namespace {

constexpr size_t kAlignment = 16;

// Returns how many slots a buffer has: on the dense kind all, else as many as fit a residency set.
size_t per_buffer(const Context& context, size_t count, size_t slot_bytes, size_t most) {
  if (slot_bytes == 0 || slot_bytes % kAlignment != 0) {
    throw std::invalid_argument(
        "a slot has " + std::to_string(slot_bytes) + " bytes; it must be a multiple of 16");
  }
  const bool together = context.kind == Kind::dense;
  const size_t needed = together ? count : 1;
  if (needed > most / slot_bytes) {
    throw std::runtime_error(
        std::to_string(needed) + " slots of " + std::to_string(slot_bytes) +
        " bytes lie in one buffer, but a buffer has " + std::to_string(most) +
        " at most; fewer sequences are needed");
  }
  const size_t set = context.residency.set_bytes();
  const size_t wanted = together || set == 0 ? count : set / slot_bytes;
  return std::clamp<size_t>(wanted, 1, most / slot_bytes);
}

std::string name_of_slot(size_t slot) { return "slot " + std::to_string(slot); }

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
  if (slot >= count()) {
    throw std::out_of_range(name_of_slot(slot) + " of " + std::to_string(count()));
  }
}

void Slots::check(const SlotSegment& segment) const {
  const auto require = [this](size_t slot) {
    require_slot(slot);
    if (!buffers_[slot / slots_per_buffer_]) {
      throw std::logic_error(name_of_slot(slot) + " has no memory");
    }
  };
  if (segment.read) {
    require(*segment.read);
  }
  size_t rows = 0;
  for (const SlotSegment::Write& write : segment.writes) {
    require(write.slot);
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

void Slots::check_use(
    uint64_t epoch, const SlotSegment& segment, const std::map<size_t, size_t>& readers) const {
  if (segment.read && uses_[*segment.read].written == 0) {
    throw std::logic_error(
        name_of_slot(*segment.read) + " is read by epoch " + std::to_string(epoch) +
        ", and nothing has written it");
  }
  const uint64_t completed = context_.epochs.completed();
  for (const SlotSegment::Write& write : segment.writes) {
    const bool goes_on = segment.read == write.slot;
    const auto reading = readers.find(write.slot);
    if (reading != readers.end() && reading->second > (goes_on ? 1 : 0)) {
      throw std::logic_error(
          name_of_slot(write.slot) + " is written by epoch " + std::to_string(epoch) +
          ", in which others read it");
    }
    const Use& use = uses_[write.slot];
    const uint64_t newest = goes_on ? use.read : std::max(use.read, use.written);
    if (newest > completed) {
      throw std::logic_error(
          name_of_slot(write.slot) + " is written by epoch " + std::to_string(epoch) +
          ", while epoch " + std::to_string(newest) + " may touch it");
    }
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
      if (!written.insert(write.slot).second) {
        throw std::logic_error(
            name_of_slot(write.slot) + " is written twice by epoch " + std::to_string(epoch));
      }
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
