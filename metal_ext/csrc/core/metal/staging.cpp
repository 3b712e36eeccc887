#include "core/metal/staging.h"

#include <algorithm>
#include <utility>

#include "core/metal/context.h"

// Implements the staging ring, and the turns of blits and changes of mappings.
namespace quire::metal {
namespace {

constexpr size_t kHalves = 2;

// Adds a copy between the ring and a piece of a block. Pieces of one length that lie at equal
// distances, as regions do, become one run, which one dispatch copies.
void add(
    std::vector<BlockArguments>& runs, Direction direction, uint64_t ring, uint64_t block,
    size_t bytes) {
  const bool fills = direction == Direction::from_file;
  if (!runs.empty() && runs.back().bytes == bytes) {
    BlockArguments& last = runs.back();
    uint64_t& stride = fills ? last.target_stride : last.source_stride;
    const uint64_t first = fills ? last.target : last.source;
    if (last.regions == 1) {
      stride = block - first;
    }
    if (block == first + last.regions * stride) {
      ++last.regions;
      return;
    }
  }
  runs.push_back(fills ? BlockArguments{ring, block, bytes, 0, bytes, 1, 0}
                       : BlockArguments{block, ring, 0, bytes, bytes, 1, 0});
}

}  // namespace

Turns::Turn Turns::change() {
  std::unique_lock lock(mutex_);
  ++changes_waiting_;
  ended_.wait(lock, [this] { return !taken_; });
  --changes_waiting_;
  taken_ = true;
  return Turn(this);
}

Turns::Turn Turns::blit() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return !taken_ && changes_waiting_ == 0; });
  taken_ = true;
  return Turn(this);
}

void Turns::end() {
  {
    const std::lock_guard lock(mutex_);
    taken_ = false;
  }
  ended_.notify_all();
}

Staging::Staging(Context& context)
    : context_(context), work_(context.device.get(), context.health, context.work.get()) {}

Staging::Half Staging::take() {
  std::unique_lock lock(mutex_);
  if (!ready_) {
    while (free_.size() < kHalves) {
      free_.push_back(make_shared_buffer(context_.device.get(), kHalfBytes));
      context_.residency.add(free_.back().get(), kHalfBytes);
    }
    context_.settle();
    ready_ = true;
  }
  given_back_.wait(lock, [this] { return !free_.empty(); });
  Half half = std::move(free_.back());
  free_.pop_back();
  return half;
}

void Staging::give_back(Half half) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(half));
  }
  given_back_.notify_one();
}

void Staging::blit(const std::vector<BlockArguments>& runs) {
  const auto turn = context_.turns.blit();
  context_.residency.refresh();
  work_.copy(runs);
}

uint32_t Staging::move(Direction direction, std::vector<Piece> pieces, FilePlace place) {
  const auto give = [this](MTL::Buffer* buffer) { give_back(NS::RetainPtr(buffer)); };
  const Half taken = take();
  const std::unique_ptr<MTL::Buffer, decltype(give)> half(taken.get(), give);
  uint32_t sum = 0;
  auto piece = pieces.begin();
  while (piece != pieces.end()) {
    std::vector<BlockArguments> runs;
    size_t filled = 0;
    while (piece != pieces.end() && filled < kHalfBytes) {
      const size_t bytes = std::min(piece->bytes, kHalfBytes - filled);
      add(runs, direction, half->gpuAddress() + filled, piece->address, bytes);
      filled += bytes;
      *piece = {piece->address + bytes, piece->bytes - bytes};
      piece += piece->bytes == 0 ? 1 : 0;
    }
    if (direction == Direction::to_file) {
      blit(runs);
    }
    sum = move_record(direction, {{half->contents(), filled}}, place, sum);
    if (direction == Direction::from_file) {
      blit(runs);
    }
    place.offset += static_cast<int64_t>(filled);
  }
  return sum;
}

}  // namespace quire::metal
