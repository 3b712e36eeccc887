#include <algorithm>

#include "life.h"

namespace quire::metal {
namespace {

constexpr size_t kMostSteps = 3;

}  // namespace

void Life::step() {
  if (steps_.size() >= kMostSteps || !leave_point()) {
    return;
  }
  std::vector<Segment> segments;
  std::vector<SequencePtr> chosen;
  for (const SequencePtr& sequence : sequences_) {
    const size_t start = sequence->stamps.size();
    const size_t room = sequence->mapped * per_block();
    if (sequence->leaving || sequence->pinned > 0 || room <= start || random(3) == 0) {
      continue;
    }
    // A tail that is being given back counts as mapped until its ticket is done.
    if (sequence->range->mapped_tokens() < room) {
      continue;
    }
    Segment segment{sequence->range.get(), start, sequence->stamps, {}, !sequence->failing};
    const size_t count = std::min<size_t>(room - start, 1 + random(random(2) == 0 ? 2 : 40));
    for (size_t i = 0; i < count; ++i) {
      segment.stamps.push_back(next_stamp_++);
    }
    segments.push_back(segment);
    chosen.push_back(sequence);
  }
  if (segments.empty()) {
    return;
  }
  // The mapper's own commands must not come first: their fault would be the backend's.
  const bool alone = !options_.threads || !hands_->working();
  if (random(24) == 0 && alone) {
    bench_.machine.fail_next_commands("a fault of the GPU");
    faults_ = true;
    for (const SequencePtr& sequence : chosen) {
      sequence->failing = true;
    }
  }
  const Bench::Step step = bench_.step(segments);
  ++deeds_.steps;
  deeds_.overlapping_steps += steps_.empty() ? 0 : 1;
  deeds_.steps_while_mapping += hands_->working() ? 1 : 0;
  for (size_t i = 0; i < chosen.size(); ++i) {
    Sequence& sequence = *chosen[i];
    const Segment& segment = segments[i];
    sequence.stamps.insert(sequence.stamps.end(), segment.stamps.begin(), segment.stamps.end());
    sequence.epochs.insert(step.epoch);
    sequence.written.resize(sequence.blocks.size());
    for (size_t b = segment.start / per_block(); b * per_block() < sequence.stamps.size(); ++b) {
      sequence.written[b] = step.epoch;
    }
  }
  steps_.push_back(step);
}

void Life::fork(const SequencePtr& parent) {
  const size_t full = full_blocks(*parent);
  const size_t tokens = parent->stamps.size() - full * per_block();
  const bool partial = tokens > 0 && tokens <= per_block();
  const std::vector<Place> target = partial ? free_run(1) : std::vector<Place>{};
  const auto range = sequences_.size() < kMostSequences ? idle_range() : nullptr;
  if (target.empty() || parent->worthless || parent->pinned > 0 || parent->pending > 0 ||
      range == nullptr) {
    if (range != nullptr) {
      idle_.push_back(range);
    }
    drop(target);
    return;
  }
  const auto child = std::make_shared<Sequence>(Sequence{.range = range});
  sequences_.push_back(child);
  child->epochs = parent->epochs;
  child->failing = parent->failing;
  share(child, {parent->blocks.begin(), parent->blocks.begin() + static_cast<ptrdiff_t>(full)});
  map_run(child, target, true);
  finish_mappings();
  ++parent->pinned;
  ++child->pinned;
  const auto kv_backend = bench_.kv_backend;
  const auto mapped = std::make_shared<bool>(true);
  submit(
      [=] {
        // A refused target is no failure: then there is nothing to copy into.
        if (child->range->mapped_tokens() > full * range->geometry().tokens_per_block()) {
          kv_backend->copy_block(*parent->range, full, *child->range, full, tokens);
        } else {
          *mapped = false;
        }
      },
      [=, this](bool) {
        --parent->pinned;
        --child->pinned;
        deeds_.copies += *mapped ? 1 : 0;
        const size_t shared = *mapped ? parent->stamps.size() : full * per_block();
        child->stamps.assign(
            parent->stamps.begin(), parent->stamps.begin() + static_cast<ptrdiff_t>(shared));
        child->failing |= parent->failing;
        child->worthless |= parent->worthless;
        child->written.resize(child->blocks.size());
      });
}

void Life::give_back_tail(const SequencePtr& sequence) {
  const size_t used = (sequence->stamps.size() + per_block() - 1) / per_block();
  if (sequence->pending == 0 && sequence->pinned == 0 && used < sequence->blocks.size()) {
    unmap_tail(sequence, used, [] {});
  }
}

void Life::leave(const SequencePtr& sequence) {
  if (sequence->pending > 0 || sequence->pinned > 0) {
    return;
  }
  sequence->leaving = true;
  std::erase(sequences_, sequence);
  leaving_.push_back(sequence);
  const size_t full = sequence->stamps.size() / per_block();
  const std::vector<Place> blocks = sequence->blocks;
  unmap_tail(sequence, 0, [=, this] {
    idle_.push_back(sequence->range);
    std::erase(leaving_, sequence);
    // What a failed step may have touched is not kept, even where that is known only now.
    if (full > 0 && !sequence->worthless && options_.kind != Kind::dense && random(2) == 0) {
      Prefix prefix{{blocks.begin(), blocks.begin() + static_cast<ptrdiff_t>(full)},
                    {sequence->stamps.begin(),
                     sequence->stamps.begin() + static_cast<ptrdiff_t>(full * per_block())}};
      for (const Place& place : prefix.blocks) {
        ++heaps_[place.heap].blocks[place.block].users;
      }
      prefixes_.push_back(std::move(prefix));
    }
  });
}

}  // namespace quire::metal
