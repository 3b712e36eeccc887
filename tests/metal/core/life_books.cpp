#include <algorithm>

#include "check.h"
#include "life.h"

namespace quire::metal {
namespace {

using Deeds = Life::Deeds;

struct Deed {
  const char* name;
  unsigned Deeds::* count;
  bool on_dense = true;
  bool in_quiet = true;
  bool in_bold = true;
};
constexpr Deed kDeeds[] = {
    {"writable maps", &Deeds::writable_maps},
    {"shared maps", &Deeds::shared_maps, false},
    {"refused maps", &Deeds::refused_maps, false},
    {"unmaps in flight", &Deeds::unmaps_in_flight, true, false},
    {"copies", &Deeds::copies},
    {"steps", &Deeds::steps},
    {"failed steps", &Deeds::failed_steps},
    {"overlapping steps", &Deeds::overlapping_steps},
    {"released heaps", &Deeds::released_heaps},
    {"heaps made again", &Deeds::remade_heaps, false},
    {"steps while mapping", &Deeds::steps_while_mapping, true, false},
    {"bundles", &Deeds::bundles, true, true, false},
};

}  // namespace

void Life::Deeds::add(const Deeds& other) {
  for (const Deed& deed : kDeeds) {
    this->*deed.count += other.*deed.count;
  }
}

std::vector<std::string> Life::Deeds::missing(const Options& options) const {
  const bool quiet = options.kind == Kind::sparse && !options.bold;
  std::vector<std::string> names;
  for (const Deed& deed : kDeeds) {
    if (this->*deed.count == 0 && (deed.on_dense || options.kind != Kind::dense) &&
        (quiet ? deed.in_quiet : deed.in_bold)) {
      names.push_back(deed.name);
    }
  }
  return names;
}

std::string Life::Deeds::text() const {
  std::string text;
  for (const Deed& deed : kDeeds) {
    text += (text.empty() ? "" : ", ") + std::to_string(this->*deed.count) + " " + deed.name;
  }
  return text;
}

void Life::submit(std::function<void()> operation, std::function<void(bool refused)> then) {
  tickets_.push_back({hands_->attempt(std::move(operation)), std::move(then)});
}

bool Life::at_point() {
  for (int looks = 0; quiet_ && !steps_.empty() && looks < 20 && random(6) > 0; ++looks) {
    const auto& epochs = bench_.kv_backend->epochs();
    epochs.wait(epochs.newest(), std::chrono::milliseconds(5));
    notice();
  }
  return !quiet_ || steps_.empty();
}

void Life::finish_mappings() {
  if (quiet_) {
    const auto kv_backend = bench_.kv_backend;
    finishes_.push_back(hands_->attempt([kv_backend] { kv_backend->finish_mappings(); }));
    deeds_.bundles += begun_maps_ > 1 ? 1 : 0;
    begun_maps_ = 0;
  }
}

bool Life::leave_point() {
  if (!quiet_ || (tickets_.empty() && !hands_->working())) {
    return true;
  }
  finish_mappings();
  while (hands_->work()) {
  }
  notice();
  return tickets_.empty() && !hands_->working();
}

// A step failed: what it was to write is unknown, and nothing of it runs any more.
void Life::lose(uint64_t epoch) {
  ++deeds_.failed_steps;
  for (const auto* list : {&sequences_, &leaving_}) {
    for (const SequencePtr& sequence : *list) {
      sequence->worthless |= sequence->epochs.contains(epoch);
    }
  }
  bench_.kv_backend->epochs().abandon(epoch);
}

// What a ticket waited for has ended before it: whether a step failed is known when the ticket's
// consequences are drawn.
void Life::notice() {
  uint64_t completed = hands_->completed();
  while (!finishes_.empty() && finishes_.front() <= completed) {
    finished_ = finishes_.front();
    finishes_.pop_front();
  }
  if (quiet_) {
    completed = finished_;  // what comes behind it does not count yet
  }
  const uint64_t epoch = bench_.kv_backend->epochs().completed();
  std::vector<Bench::Step> running;
  for (const Bench::Step& step : steps_) {
    const auto status = step.commands->status();
    if (status == MTL::CommandBufferStatusError) {
      lose(step.epoch);
    } else if (status != MTL::CommandBufferStatusCompleted || step.epoch > epoch) {
      running.push_back(step);
    }
  }
  steps_ = std::move(running);
  noticed_epoch_ = epoch;
  while (!tickets_.empty() && tickets_.front().number <= completed) {
    const Ticket ticket = std::move(tickets_.front());
    tickets_.pop_front();
    ticket.then(hands_->refused(ticket.number));
  }
}

void Life::let_go() {
  tickets_.clear();
  leaving_.clear();
  steps_.clear();
  sequences_.clear();
  idle_.clear();
  heaps_.clear();
}

void Life::settle() {
  do {
    if (!tickets_.empty()) {
      finish_mappings();
    }
    bench_.machine.tick();
    notice();
  } while (hands_->work() || !tickets_.empty() || !steps_.empty());
}

Life::SequencePtr Life::any_sequence() {
  return sequences_.empty() ? nullptr : sequences_[random(sequences_.size())];
}

std::shared_ptr<AddressRange> Life::idle_range() {
  if (!idle_.empty()) {
    const auto range = idle_.back();
    idle_.pop_back();
    if (random(8) == 0) {
      return nullptr;  // the handle goes, and the backend keeps what it stood for
    }
    return range;
  }
  try {
    return bench_.kv_backend->new_range();
  } catch (const std::system_error&) {
    return nullptr;
  }
}

// Free blocks that lie side by side, from here on the caller's.
std::vector<Life::Place> Life::free_run(size_t most) {
  std::vector<Place> run;
  if (heaps_.empty()) {
    return run;
  }
  const size_t heap = random(heaps_.size());
  auto& blocks = heaps_[heap].blocks;
  for (size_t b = random(blocks.size()); b < blocks.size() && run.size() < most; ++b) {
    if (blocks[b].users > 0) {
      if (!run.empty()) {
        break;
      }
      continue;
    }
    blocks[b].users = 1;
    run.push_back({heap, b});
  }
  return run;
}

void Life::drop(const std::vector<Place>& blocks) {
  for (const Place& place : blocks) {
    --heaps_[place.heap].blocks[place.block].users;
  }
}

size_t Life::full_blocks(const Sequence& sequence) const {
  size_t full = 0;
  while (!sequence.worthless && sequence.pinned == 0 && full < sequence.written.size() &&
         (full + 1) * per_block() <= sequence.stamps.size() && full < sequence.mapped &&
         sequence.written[full] <= noticed_epoch_) {
    ++full;
  }
  return full;
}

void Life::share(const SequencePtr& sequence, const std::vector<Place>& blocks) {
  for (size_t first = 0; first < blocks.size();) {
    size_t end = first + 1;
    while (end < blocks.size() && blocks[end].heap == blocks[first].heap &&
           blocks[end].block == blocks[end - 1].block + 1) {
      ++end;
    }
    const std::vector<Place> run(blocks.begin() + static_cast<ptrdiff_t>(first),
                                 blocks.begin() + static_cast<ptrdiff_t>(end));
    for (const Place& place : run) {
      ++heaps_[place.heap].blocks[place.block].users;
    }
    map_run(sequence, run, false);
    first = end;
  }
}

void Life::map_run(const SequencePtr& sequence, const std::vector<Place>& run, bool writable) {
  const size_t block = sequence->blocks.size();
  sequence->blocks.insert(sequence->blocks.end(), run.begin(), run.end());
  sequence->written.resize(sequence->blocks.size());
  ++sequence->pending;
  const auto heap = heaps_[run[0].heap].heap;
  deeds_.remade_heaps += heap->committed_bytes() == 0 ? 1 : 0;
  ++begun_maps_;
  const auto kv_backend = bench_.kv_backend;
  submit(
      [=] {
        kv_backend->commit(*heap);
        sequence->range->map(
            heap, static_cast<int64_t>(run[0].block), static_cast<int64_t>(block),
            static_cast<int64_t>(run.size()), writable);
      },
      [=, this](bool refused) {
        --sequence->pending;
        if (!refused) {
          sequence->mapped += run.size();
          ++(writable ? deeds_.writable_maps : deeds_.shared_maps);
          return;
        }
        CHECK(writable);  // what is shared has memory
        ++deeds_.refused_maps;
        sequence->blocks.resize(block);
        sequence->written.resize(block);
        drop(run);
      });
}

void Life::unmap_tail(const SequencePtr& sequence, size_t keep, std::function<void()> then) {
  const std::vector<Place> gone(
      sequence->blocks.begin() + static_cast<ptrdiff_t>(keep), sequence->blocks.end());
  sequence->blocks.resize(keep);
  sequence->mapped = keep;
  ++sequence->pending;
  const auto running = [&](const Bench::Step& step) {
    return sequence->epochs.contains(step.epoch);
  };
  deeds_.unmaps_in_flight += std::any_of(steps_.begin(), steps_.end(), running) ? 1 : 0;
  submit(
      [=] {
        if (!gone.empty()) {
          sequence->range->unmap(static_cast<int64_t>(keep), static_cast<int64_t>(gone.size()));
        }
      },
      [=, this](bool refused) {
        CHECK(!refused);
        --sequence->pending;
        then();  // may keep some of them
        drop(gone);
        sequence->written.resize(sequence->blocks.size());
      });
}

void Life::evict() {
  if (!prefixes_.empty()) {
    const auto at = std::next(prefixes_.begin(), static_cast<ptrdiff_t>(random(prefixes_.size())));
    drop(at->blocks);
    prefixes_.erase(at);
  }
}

void Life::release_heap() {
  if (heaps_.empty()) {
    return;
  }
  const size_t index = random(heaps_.size());
  auto& blocks = heaps_[index].blocks;
  const auto used = [](const BlockState& block) { return block.users > 0; };
  if (std::any_of(blocks.begin(), blocks.end(), used)) {
    return;
  }
  for (BlockState& block : blocks) {
    block.users = 1;
  }
  const auto heap = heaps_[index].heap;
  ++deeds_.released_heaps;
  submit([heap] { heap->release(0, static_cast<int64_t>(heap->geometry().blocks_per_heap())); },
         [this, index](bool) {
           for (BlockState& block : heaps_[index].blocks) {
             block.users = 0;
           }
         });
}

void Life::check_at_rest(const SequencePtr& sequence) {
  const uint64_t newest = bench_.kv_backend->epochs().newest();
  if (sequence->pending > 0 || sequence->pinned > 0 || sequence->failing ||
      bench_.kv_backend->epochs().completed() < newest || sequence->mapped == 0) {
    return;
  }
  const size_t mapped = sequence->mapped * per_block();
  CHECK(sequence->range->mapped_tokens() == mapped);
  const RowPlaces places(bench_.metal(), *sequence->range, mapped);
  std::vector<std::string> mistakes;
  check_rows(places, bench_.kv_backend->geometry(), sequence->stamps, mapped, mistakes);
  CHECK_CASE(mistakes.empty(), mistakes.front());
}

}  // namespace quire::metal
