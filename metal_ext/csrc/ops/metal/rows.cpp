#include "ops/metal/rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "core/checked.h"
#include "core/metal/kernel_text.h"
#include "metal/arguments.h"
#include "ops/checks.h"
#include "ops/metal/on_device.h"
#include "ops/metal/ops.h"

// Implements a step on a GPU: the tables by which kernels find each row (token) and each state
// slot, and the step's last command, which signals the step's epoch (number).
namespace quire::ops {
namespace {

// The backend, and the arrays that represent its buffers. Commands over rows keep both alive.
struct Kept {
  std::shared_ptr<MetalKVBackend> kv_backend;
  std::vector<std::vector<mx::array>> stand_ins;
};

// Returns host values as an array of 32-bit words for the GPU. MLX keeps the array and `kept` until
// the array's readers have run.
template <class T>
mx::array words_of(const std::vector<T>& values, std::shared_ptr<const void> kept = nullptr) {
  static_assert(sizeof(T) % sizeof(uint32_t) == 0);
  const size_t bytes = values.size() * sizeof(T);
  auto memory = std::make_shared<mx::allocator::Data>(mx::allocator::malloc(bytes));
  mx::allocator::Buffer buffer = memory->buffer();
  std::memcpy(buffer.raw_ptr(), values.data(), bytes);
  return mx::array(
      mx::allocator::Data(buffer, [memory, kept](mx::allocator::Buffer) {}),
      {narrowed<int>("words", bytes / sizeof(uint32_t))}, mx::uint32);
}

// Returns an array by which MLX tracks uses of a buffer. The array has one element, because MLX
// commits commands early if their arrays have many elements.
mx::array stand_in(MTL::Buffer* buffer) {
  return mx::array(
      mx::allocator::Data(as_mlx_buffer(buffer), [](mx::allocator::Buffer) {}), {1}, mx::uint8);
}

}  // namespace

MetalRows::MetalRows(std::shared_ptr<MetalKVBackend> kv_backend, std::vector<Segment> segments)
    : kv_backend_(std::move(kv_backend)),
      table_(std::move(segments)),
      epoch_(kv_backend_->memory->epochs().start()),
      entries_(words_of(std::vector<uint32_t>{0})),
      pages_(entries_) {
  kv_backend_->open_epochs.insert(epoch_);
  try {
    use_ranges();
    find_written();
    find_entries();
  } catch (...) {
    abandon();
    throw;
  }
}

void MetalRows::use_ranges() {
  size_t row = 0;
  for (const Segment& segment : table_.segments()) {
    const auto count = static_cast<size_t>(segment.count);
    kv_backend_->memory->own(*segment.range)
        .use(epoch_, static_cast<size_t>(segment.start), count);
    first_rows_.push_back(row);
    row += count;
  }
}

void MetalRows::find_entries() {
  const metal::KVBackend& memory = *kv_backend_->memory;
  const size_t tokens = memory.geometry().tokens_per_block();
  std::vector<metal::RowEntry> entries;
  std::vector<uint64_t> pages;
  for (size_t buffer = 0; buffer < memory.buffers_per_range(); ++buffer) {
    for (const Segment& segment : table_.segments()) {
      const auto start = narrowed<uint32_t>("start", segment.start);
      const auto end = narrowed<uint32_t>("end", segment.start + segment.count);
      metal::RowEntry entry{0, start, narrowed<uint32_t>("pages", pages.size())};
      if (memory.kind() == metal::Kind::paged) {
        const auto addresses =
            memory.own(*segment.range).page_addresses((end + tokens - 1) / tokens);
        pages.insert(pages.end(), addresses.begin(), addresses.end());
      } else {
        const auto shift = static_cast<uint64_t>(
            segment.range->mapped_run(static_cast<size_t>(segment.start)).shift);
        entry.base = memory.own(*segment.range).row_base(buffer) +
                     shift * memory.geometry().row_bytes(0);  // a ring's rows have one length
      }
      for (; entry.position < end; ++entry.position) {
        entries.push_back(entry);
      }
    }
  }
  entries_ = words_of(entries, std::make_shared<const Kept>(kv_backend_, written_));
  pages_ = pages.empty() ? entries_ : words_of(pages);
}

void MetalRows::find_written() {
  const metal::KVBackend& memory = *kv_backend_->memory;
  written_.resize(memory.buffers_per_range());
  if (memory.kind() == metal::Kind::paged) {
    return;
  }
  const bool sparse = memory.kind() == metal::Kind::sparse;
  for (const Segment& segment : table_.segments()) {
    if (sparse && segment.count == 1) {
      kv_backend_->by_address[segment.range.get()] = epoch_;
    } else {
      kv_backend_->by_address.erase(segment.range.get());
    }
  }
  std::vector<MTL::Buffer*> seen;
  for (size_t region = 0; region < memory.geometry().regions(); ++region) {
    auto& stand_ins = written_[memory.place(region).buffer];
    if (!stand_ins.empty()) {
      continue;
    }
    for (const Segment& segment : table_.segments()) {
      if (sparse && segment.count == 1) {
        continue;
      }
      MTL::Buffer* const buffer = memory.own(*segment.range).view(region).buffer;
      if (std::find(seen.begin(), seen.end(), buffer) == seen.end()) {
        seen.push_back(buffer);
        stand_ins.push_back(stand_in(buffer));
      }
    }
  }
}

int64_t MetalRows::entries_offset(size_t buffer) const {
  return static_cast<int64_t>(buffer * size() * sizeof(metal::RowEntry));
}

const DecodeCut& MetalRows::decode_cut(size_t first, size_t count, uint32_t window) {
  if (const auto found = cuts_.find({first, count, window}); found != cuts_.end()) {
    return found->second;
  }
  std::vector<metal::DecodeTask> tasks;
  std::vector<uint32_t> first_task;
  for (uint32_t row = 0; row < count; ++row) {
    first_task.push_back(narrowed<uint32_t>("tasks", tasks.size()));
    const auto position = narrowed<uint32_t>("position", table_.rows()[first + row].position);
    const uint32_t splits = metal::split_count(position - metal::first_seen(position, window));
    for (uint32_t split = 0; split < splits; ++split) {
      tasks.push_back({row, split});
    }
  }
  first_task.push_back(narrowed<uint32_t>("tasks", tasks.size()));
  const DecodeCut cut{words_of(tasks), words_of(first_task), tasks.size(), tasks.size() > count};
  return cuts_.emplace(std::tuple(first, count, window), cut).first->second;
}

void MetalRows::require_open(const char* operation) const {
  require<std::logic_error>(!closed_, operation, " of epoch ", epoch_, ", which has ended");
}

void MetalRows::close() {
  require_open("step_end");
  const uint64_t oldest = *kv_backend_->open_epochs.begin();
  require<std::logic_error>(
      oldest == epoch_, "epoch ", epoch_, " cannot end before epoch ", oldest);
  closed_ = true;
  kv_backend_->open_epochs.erase(epoch_);
}

void MetalRows::require_not_ended(const char* operation) const {
  require<std::logic_error>(!ended_, operation, " runs after the end of its step, epoch ", epoch_,
                            ": step_end was not given what depends on it");
}

void MetalRows::abandon() {
  closed_ = true;
  ended_ = true;
  kv_backend_->open_epochs.erase(epoch_);
  if (kv_backend_->newest_ended == epoch_) {
    kv_backend_->newest_end.reset();  // the array newest_end may never be evaluated
  }
  kv_backend_->memory->epochs().abandon(epoch_);
}

void check_kv_backend_of(
    const MetalRows& rows, const std::shared_ptr<MetalKVBackend>& kv_backend) {
  require<std::invalid_argument>(
      rows.kv_backend() == kv_backend, "the rows are of another backend");
}

void check_rows_of(
    const char* operation, const MetalRows& rows,
    const std::shared_ptr<MetalKVBackend>& kv_backend) {
  check_kv_backend_of(rows, kv_backend);
  rows.require_open(operation);
}

MetalStateRows::MetalStateRows(
    std::shared_ptr<MetalRows> rows, const std::vector<metal::SlotSegment>& segments)
    : rows_(std::move(rows)), begun_(rows_->entries()), written_(begun_) {
  rows_->require_open("state_rows");
  metal::Slots* const slots = rows_->kv_backend()->memory->slots();
  require<std::invalid_argument>(slots != nullptr, "the backend has no slots");
  slots->use(rows_->epoch(), segments);
  std::vector<metal::DeltaSegment> begun;
  std::vector<metal::DeltaWrite> written;
  for (const metal::SlotSegment& segment : segments) {
    begun.push_back(
        {segment.read ? slots->place(*segment.read) : 0, segment.read ? 1u : 0u,
         narrowed<uint32_t>("rows", size_), narrowed<uint32_t>("rows", segment.count),
         narrowed<uint32_t>("writes", written.size()),
         narrowed<uint32_t>("writes", segment.writes.size()), 0});
    for (const metal::SlotSegment::Write& write : segment.writes) {
      written.push_back({slots->place(write.slot), narrowed<uint32_t>("rows", write.rows), 0});
    }
    size_ += segment.count;
  }
  segments_ = narrowed<uint32_t>("segments", segments.size());
  std::vector<std::vector<mx::array>> stand_ins;
  if (MTL::Buffer* const arena = slots->arena(); arena != nullptr) {
    arena_ = stand_in(arena);
    stand_ins.push_back({*arena_});
  }
  begun_ = words_of(begun, std::make_shared<const Kept>(rows_->kv_backend(), std::move(stand_ins)));
  written_ = words_of(written);
}

void MetalStateRows::require_room(int64_t offset, size_t bytes) const {
  checked_run(
      "bytes of a slot", offset, narrowed<int64_t>("bytes of a state", bytes),
      slots().slot_bytes());
}

namespace {

// Ends a step after all writers of the arrays and all earlier MLX encoders. The end is a command,
// because MLX might leave out an encoder that has no commands.
struct StepEnd {
  DeviceRows rows;

  void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) const {
    const uint64_t epoch = rows->epoch();
    allocate_on_device(out[0]);
    encoder.kernel(metal::mark_step_kernel());
    for (const mx::array& array : in) {
      encoder.after(array);
    }
    encoder.output(out[0], 0);
    encoder.bytes(epoch, 1);
    encoder.run_groups(MTL::Size(1, 1, 1));
    encoder.signal(rows->kv_backend()->memory->epochs().event(), epoch);
    rows->end();
  }
};

}  // namespace

mx::array device::step_end(
    const std::vector<mx::array>& arrays, const DeviceRows& rows, const DeviceMemory& kv_backend) {
  require<std::invalid_argument>(
      !arrays.empty(), "step_end needs the arrays that the step computes");
  check_rows_of("step_end", *rows, kv_backend);
  rows->close();
  std::vector<mx::array> inputs(arrays);
  inputs.push_back(rows->entries());
  if (kv_backend->newest_end) {
    inputs.push_back(*kv_backend->newest_end);
  }
  const mx::array end(
      {1}, mx::uint64, device_operation("step_end", StepEnd{rows}), std::move(inputs));
  kv_backend->newest_end = end;
  kv_backend->newest_ended = rows->epoch();
  return end;
}

uint64_t device::copy_block(
    const DeviceMemory& kv_backend, const std::shared_ptr<Mapper>& mapper,
    const std::shared_ptr<AddressRange>& source, int64_t source_block,
    const std::shared_ptr<AddressRange>& target, int64_t target_block, int64_t tokens,
    const std::shared_ptr<CopyCounter>& counter) {
  kv_backend->memory->own(*source);
  kv_backend->memory->own(*target);
  const size_t bytes =
      check_block_copy(*source, source_block, *target, target_block, tokens);
  return mapper->submit([=] {
    kv_backend->memory->copy_block(
        *source, static_cast<size_t>(source_block), *target, static_cast<size_t>(target_block),
        static_cast<size_t>(tokens));
    counter->add(bytes);
  });
}

}  // namespace quire::ops
