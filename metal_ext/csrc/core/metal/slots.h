#pragma once

#include <Metal/Metal.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/metal/context.h"
#include "core/records.h"

// State slots in a GPU's memory, and the check that no step overwrites what another one uses.
namespace quire::metal {

// Consecutive rows of one sequence in a step, and the state slots that these rows use.
struct SlotSegment {
  struct Write {
    size_t rows;  // the write follows the first `rows` rows
    size_t slot;
  };
  size_t count;
  std::optional<size_t> read;  // empty for a state of zeros
  std::vector<Write> writes;   // ascending by rows; the state after later rows is not kept
};

// A fixed number of state slots, in buffers that are made for their first slot and stay until
// shutdown. A slot holds the states of all recurrent layers of one sequence at one position. Only
// the engine's thread may call methods, but for move().
//   buffer 0 | slot 0 | slot 1 | slot 2 |   buffer 1 | slot 3 | slot 4 | ...
// Rule: a slot is overwritten only after every step that may use the slot has completed. But a
// sequence may overwrite the slot that it reads, because MLX runs one sequence's steps in order
// (see ops/ops.h). If the rule is broken, use() throws std::logic_error before anything runs.
class Slots {
 public:
  // A buffer has at most `most` bytes. Throws std::invalid_argument unless slot_bytes is a multiple
  // of 16, std::runtime_error if slots do not fit.
  Slots(Context& context, size_t count, size_t slot_bytes, size_t most);

  // Makes the buffer of a slot, unless there is one. Throws std::out_of_range for an unknown slot,
  // std::system_error(ENOMEM) if refused.
  void commit(size_t slot);
  size_t committed_bytes() const { return committed_bytes_; }

  size_t count() const { return uses_.size(); }
  size_t slot_bytes() const { return slot_bytes_; }
  // Returns the slot's GPU address, or on the dense kind its offset in the buffer.
  uint64_t place(size_t slot) const;
  // Returns the one buffer of the dense kind, which kernels bind, or null on other kinds and
  // before the first commit().
  MTL::Buffer* arena() const;

  // Records the slots that a step uses, and checks the rule. Throws std::out_of_range for an
  // unknown slot, std::invalid_argument for a segment without a write, or whose writes do not
  // ascend, std::logic_error for a slot without memory.
  void use(uint64_t epoch, const std::vector<SlotSegment>& segments);

  // Moves a slot's bytes to or from a file, as AddressRange::move_block() does, on any thread. The
  // slot has memory, and no step may use it meanwhile.
  uint32_t move(Direction direction, size_t slot, int64_t fd, int64_t offset);

  void drop() { buffers_.clear(); }

 private:
  // The epoch (number) of the last step that wrote a slot, and of the last that read it. 0 if none.
  struct Use {
    uint64_t written = 0;
    uint64_t read = 0;  // by sequences that do not write the slot
    bool filled = false;  // whether the slot was read from a file
  };

  void require_slot(size_t slot) const;
  void require_memory(size_t slot) const;
  void check(const SlotSegment& segment) const;
  // `readers` is {slot: number of segments of this step that read the slot}.
  void check_use(
      uint64_t epoch, const SlotSegment& segment, const std::map<size_t, size_t>& readers) const;

  Context& context_;
  const size_t slot_bytes_;
  size_t slots_per_buffer_;
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers_;  // null before the first use
  size_t committed_bytes_ = 0;
  std::vector<Use> uses_;
};

}  // namespace quire::metal
