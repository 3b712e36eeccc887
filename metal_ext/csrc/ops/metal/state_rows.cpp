#include "ops/metal/state_rows.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "core/checked.h"
#include "metal/arguments.h"
#include "ops/metal/words.h"

namespace quire::ops {
namespace {

// What commands over the cells need, whoever has let go of it meanwhile.
struct Kept {
  std::shared_ptr<MetalSubstrate> substrate;
  std::optional<mx::array> arena;
};

}  // namespace

MetalStateRows::MetalStateRows(
    std::shared_ptr<MetalRows> rows, const std::vector<metal::CellSegment>& segments)
    : rows_(std::move(rows)), begun_(rows_->entries()), written_(begun_) {
  rows_->require_open("state_rows");
  metal::Cells* const cells = rows_->substrate()->memory->cells();
  if (cells == nullptr) {
    throw std::invalid_argument("the substrate has no cells");
  }
  size_t count = 0;
  for (const metal::CellSegment& segment : segments) {
    count += segment.count;
  }
  if (count != rows_->size()) {
    throw std::invalid_argument(
        "the segments have " + std::to_string(count) + " rows, and the step has " +
        std::to_string(rows_->size()));
  }
  cells->use(rows_->epoch(), segments);
  std::vector<metal::DeltaSegment> begun;
  std::vector<metal::DeltaWrite> written;
  size_t first = 0;
  for (const metal::CellSegment& segment : segments) {
    begun.push_back(
        {segment.read ? cells->place(*segment.read) : 0, segment.read ? 1u : 0u,
         narrowed<uint32_t>("rows", first), narrowed<uint32_t>("rows", segment.count),
         narrowed<uint32_t>("writes", written.size())});
    for (const metal::CellSegment::Write& write : segment.writes) {
      written.push_back({cells->place(write.cell), narrowed<uint32_t>("rows", write.rows), 0});
    }
    first += segment.count;
  }
  segments_ = narrowed<uint32_t>("segments", segments.size());
  if (MTL::Buffer* const arena = cells->arena(); arena != nullptr) {
    arena_ = stand_in(arena);
  }
  begun_ = words_of(begun, std::make_shared<const Kept>(rows_->substrate(), arena_));
  written_ = words_of(written);
}

void MetalStateRows::require_room(int64_t offset, size_t bytes) const {
  checked_run(
      "bytes of a cell", offset, narrowed<int64_t>("bytes of a state", bytes),
      cells().cell_bytes());
}

}  // namespace quire::ops
