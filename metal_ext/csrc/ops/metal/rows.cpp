#include "ops/metal/rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/checked.h"
#include "metal/arguments.h"
#include "ops/metal/words.h"

namespace quire::ops {
namespace {

// What commands over the rows need, whoever has let go of it meanwhile: the substrate, which ends
// with its last reference, and what stands for its buffers.
struct Kept {
  std::shared_ptr<MetalSubstrate> substrate;
  std::vector<std::vector<mx::array>> written;
};

}  // namespace

MetalRows::MetalRows(std::shared_ptr<MetalSubstrate> substrate, std::vector<Segment> segments)
    : substrate_(std::move(substrate)),
      table_(std::move(segments)),
      epoch_(substrate_->memory->epochs().start()),
      entries_(words_of(std::vector<uint32_t>{0})),
      pages_(entries_) {
  substrate_->open_epochs.insert(epoch_);
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
    substrate_->memory->use(
        *segment.range, epoch_, static_cast<size_t>(segment.start), count);
    first_rows_.push_back(row);
    row += count;
  }
}

void MetalRows::find_entries() {
  const metal::Substrate& memory = *substrate_->memory;
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
            memory.page_addresses(*segment.range, (end + tokens - 1) / tokens);
        pages.insert(pages.end(), addresses.begin(), addresses.end());
      } else {
        entry.base = memory.row_base(*segment.range, buffer);
      }
      for (; entry.position < end; ++entry.position) {
        entries.push_back(entry);
      }
    }
  }
  entries_ = words_of(entries, std::make_shared<const Kept>(substrate_, written_));
  pages_ = pages.empty() ? entries_ : words_of(pages);
}

void MetalRows::find_written() {
  const metal::Substrate& memory = *substrate_->memory;
  written_.resize(memory.buffers_per_range());
  if (memory.kind() == metal::Kind::paged) {
    return;
  }
  const bool sparse = memory.kind() == metal::Kind::sparse;
  for (const Segment& segment : table_.segments()) {
    if (sparse && segment.count == 1) {
      substrate_->by_address[segment.range.get()] = epoch_;
    } else {
      substrate_->by_address.erase(segment.range.get());
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
      MTL::Buffer* const buffer = memory.view(*segment.range, region).buffer;
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

const DecodeCut& MetalRows::decode_cut(size_t first, size_t count) {
  if (const auto found = cuts_.find({first, count}); found != cuts_.end()) {
    return found->second;
  }
  std::vector<metal::DecodeTask> tasks;
  std::vector<uint32_t> first_task;
  for (uint32_t row = 0; row < count; ++row) {
    first_task.push_back(narrowed<uint32_t>("tasks", tasks.size()));
    const uint32_t splits = metal::split_count(table_.rows()[first + row].position);
    for (uint32_t split = 0; split < splits; ++split) {
      tasks.push_back({row, split});
    }
  }
  first_task.push_back(narrowed<uint32_t>("tasks", tasks.size()));
  const DecodeCut cut{words_of(tasks), words_of(first_task), tasks.size(), tasks.size() > count};
  return cuts_.emplace(std::pair(first, count), cut).first->second;
}

void MetalRows::require_open(const char* operation) const {
  if (closed_) {
    throw std::logic_error(
        std::string(operation) + " of epoch " + std::to_string(epoch_) + ", which has ended");
  }
}

void MetalRows::close() {
  require_open("step_end");
  if (const uint64_t oldest = *substrate_->open_epochs.begin(); oldest != epoch_) {
    throw std::logic_error(
        "epoch " + std::to_string(epoch_) + " cannot end before epoch " +
        std::to_string(oldest));
  }
  closed_ = true;
  substrate_->open_epochs.erase(epoch_);
}

void MetalRows::require_not_ended(const char* operation) const {
  if (ended_) {
    throw std::logic_error(
        std::string(operation) + " runs after the end of its step, epoch " +
        std::to_string(epoch_) + ": step_end was not given what depends on it");
  }
}

void MetalRows::abandon() {
  closed_ = true;
  ended_ = true;
  substrate_->open_epochs.erase(epoch_);
  if (substrate_->newest_ended == epoch_) {
    substrate_->newest_end.reset();  // it may never be evaluated
  }
  substrate_->memory->epochs().abandon(epoch_);
}

void check_substrate_of(
    const MetalRows& rows, const std::shared_ptr<MetalSubstrate>& substrate) {
  if (rows.substrate() != substrate) {
    throw std::invalid_argument("the rows are of another substrate");
  }
}

void check_rows_of(
    const char* operation, const MetalRows& rows,
    const std::shared_ptr<MetalSubstrate>& substrate) {
  check_substrate_of(rows, substrate);
  rows.require_open(operation);
}

}  // namespace quire::ops
