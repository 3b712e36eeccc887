#include "core/metal/bundle.h"

#include <algorithm>

#include "core/metal/context.h"
#include "core/metal/sparse.h"

namespace quire::metal {

void Bundle::add(SparseBufferRange& range, const Run& run) {
  if (!point_) {
    point_ = context_.mapping_point("blocks cannot be mapped");
  }
  maps_.emplace_back(&range, run);
}

bool Bundle::has(const SparseBufferRange& range) const {
  return std::any_of(
      maps_.begin(), maps_.end(), [&range](const auto& map) { return map.first == &range; });
}

void Bundle::finish() {
  const auto maps = std::exchange(maps_, {});
  const Epochs::Pause point = std::move(point_);
  if (maps.empty()) {
    return;
  }
  context_.health.require();
  context_.residency.refresh();
  for (const auto& [range, run] : maps) {
    range->begin_map(run);
  }
  // Rule: a page is touched only by what is encoded after its mapping was observed.
  context_.mapping->finish();
  // Rule: what a new owner can see was zeroed first: pages come with what was last in them.
  std::vector<BlockArguments> zeros;
  for (const auto& [range, run] : maps) {
    if (run.writable) {
      range->add_zeros(run, zeros);
    }
  }
  if (!zeros.empty()) {
    context_.work->zero(zeros);
  }
  for (const auto& [range, run] : maps) {
    range->observe(run);
  }
}

void Bundle::withdraw() {
  for (const auto& [range, run] : maps_) {
    range->withdraw(run);
  }
  maps_.clear();
  point_.reset();
}

}  // namespace quire::metal
