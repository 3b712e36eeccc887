#include "core/metal/residency.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/checked.h"

// Implements residency sets: their members, the requests for residency, and their queues.
namespace quire::metal {

Heartbeat::Heartbeat(
    std::chrono::nanoseconds interval, std::chrono::nanoseconds keep, Clock now,
    std::function<void()> beat)
    : interval_(interval),
      keep_(keep),
      now_(std::move(now)),
      beat_(std::move(beat)),
      last_use_(now_() - keep),
      thread_([this] { run(); }) {}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Heartbeat::use() {
  last_use_ = now_();
  if (sleeps_) {
    { const std::lock_guard lock(mutex_); }  // once locked, run() waits for changed_
    changed_.notify_all();
  }
}

void Heartbeat::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (!in_use()) {
      sleeps_ = true;
      changed_.wait(lock, [this] { return stopping_ || in_use(); });
      sleeps_ = false;
      continue;
    }
    changed_.wait_for(lock, interval_, [this] { return stopping_; });
    if (!stopping_ && in_use()) {
      lock.unlock();
      beat_();
      lock.lock();
    }
  }
}

ResidentSet::ResidentSet(MTL::Device* device) {
  const auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
  NS::Error* error = nullptr;
  set_ = NS::TransferPtr(device->newResidencySet(descriptor.get(), &error));
  if (!set_) {
    refuse_memory("the GPU gives no residency set");
  }
}

bool ResidentSet::fill(std::deque<Member>& waiting, uint64_t size) {
  const size_t before = members_.size();
  const auto fits = [&](uint64_t bytes) { return bytes == 0 || bytes_ + bytes <= size; };
  while (!waiting.empty() && (members_.empty() || fits(waiting.front().bytes))) {
    set_->addAllocation(waiting.front().allocation);
    bytes_ += waiting.front().bytes;
    members_.push_back(waiting.front());
    waiting.pop_front();
  }
  if (members_.size() == before) {
    return false;
  }
  set_->commit();  // uncommitted members have no effect
  return true;
}

void ResidentSet::put_on(Queue queue) {
  if (queues_.insert(queue).second) {
    std::visit([this](auto* its) { its->addResidencySet(set_.get()); }, queue);
  }
}

std::vector<ResidentSet::Member> ResidentSet::empty() {
  for (const Queue& queue : std::exchange(queues_, {})) {
    std::visit([this](auto* its) { its->removeResidencySet(set_.get()); }, queue);
  }
  set_->endResidency();
  set_->removeAllAllocations();
  set_->commit();
  full = false;
  bytes_ = 0;
  return std::exchange(members_, {});
}

Residency::Residency(MTL::Device* device, const Health& health, const Options& options)
    : device_(device),
      health_(health),
      options_(options),
      set_bytes_(options.working_set_bytes * kSetPercent / 100),
      fresh_(options.now()) {
  if (options_.supported && options_.keep > options_.keep.zero()) {
    const auto beat = [this] {
      const std::lock_guard changes(changes_);
      if (health_.failure().empty()) {
        ask_for_all();
      }
    };
    heartbeat_ =
        std::make_unique<Heartbeat>(options_.interval, options_.keep, options_.now, beat);
  }
}

void Residency::add(MTL::Allocation* memory, uint64_t bytes) {
  const std::lock_guard books(books_);
  if (options_.supported) {
    waiting_.push_back({memory, bytes});
  } else {  // a buffer: only the sparse kind, which always has sets, uses heaps
    unattached_.push_back(static_cast<MTL::Buffer*>(memory));
  }
}

void Residency::hold(std::vector<NS::SharedPtr<MTL::Buffer>> buffers) {
  if (!options_.supported) {
    return;
  }
  settle();  // keeps earlier memory out of these buffers' sets
  const std::lock_guard changes(changes_);
  const size_t most = std::max(options_.most_sets, kLeftByWeights + 1) - kLeftByWeights;
  // Sort the largest buffers first, so that small buffers fill the rest of a set.
  std::sort(buffers.begin(), buffers.end(), [](const auto& one, const auto& other) {
    return one->length() > other->length();
  });
  {
    const std::lock_guard books(books_);
    require<std::logic_error>(held_.empty(), "the weights are resident already");
    close();
    for (const auto& buffer : buffers) {
      waiting_.push_back({buffer.get(), buffer->length()});
    }
    held_ = std::move(buffers);
  }
  make_sets(most);
  const std::lock_guard books(books_);
  if (open_) {
    sets_.back().full = true;
  }
  close();
}

void Residency::close() {
  changed_ += open_ ? 1 : 0;
  open_ = false;
}

void Residency::put_on_own(ResidentSet& set) {
  for (const ResidentSet::Queue& queue : own_) {
    set.put_on(queue);
  }
}

// Moves waiting memory into the open set, or else a new one. Returns the set, or null if unchanged.
NS::SharedPtr<MTL::ResidencySet> Residency::fill(size_t most) {
  if (!open_) {
    if (empty_.empty()) {
      empty_.emplace_back(device_);
    }
    sets_.push_back(std::move(empty_.back()));
    empty_.pop_back();
    open_ = true;
    put_on_own(sets_.back());
  }
  ResidentSet& set = sets_.back();
  // The last allowed set takes members of any size.
  const bool changed =
      set.fill(waiting_, sets_.size() < most ? set_bytes_ : ResidentSet::kAnySize);
  auto result = changed ? set.set() : NS::SharedPtr<MTL::ResidencySet>();
  if (!waiting_.empty()) {
    set.full = true;
    close();
  }
  return result;
}

void Residency::make_sets(size_t most) {
  const auto pool = new_pool();
  while (true) {
    NS::SharedPtr<MTL::ResidencySet> changed;
    {
      const std::lock_guard books(books_);
      if (waiting_.empty()) {
        return;
      }
      changed = fill(most);
    }
    if (changed) {
      changed->requestResidency();  // this may take long
    }
  }
}

bool Residency::crowded() const {
  const std::lock_guard books(books_);
  return !waiting_.empty() && !open_ && sets_.size() >= options_.most_sets;
}

void Residency::settle() {
  refresh();
  const std::lock_guard changes(changes_);
  make_sets(options_.most_sets);
}

void Residency::gather() {
  const std::lock_guard changes(changes_);
  {
    const auto pool = new_pool();
    const std::lock_guard books(books_);
    const auto kept = std::stable_partition(
        sets_.begin(), sets_.end(), [](const ResidentSet& set) { return set.full; });
    for (auto set = kept; set != sets_.end(); ++set) {
      const auto members = set->empty();
      waiting_.insert(waiting_.begin(), members.begin(), members.end());
      empty_.push_back(std::move(*set));
    }
    sets_.erase(kept, sets_.end());
    open_ = false;
  }
  make_sets(options_.most_sets);
  empty_.clear();
}

// Removes memory from its residency set: empties the set, and fills it again without this memory.
void Residency::remove(const MTL::Allocation* memory) {
  const std::lock_guard changes(changes_);
  const std::lock_guard books(books_);
  const auto is_it = [memory](const ResidentSet::Member& member) {
    return member.allocation == memory;
  };
  std::erase(unattached_, memory);
  std::erase_if(waiting_, is_it);
  const auto found = std::ranges::find_if(sets_, [&](const ResidentSet& set) {
    return std::ranges::any_of(set.members(), is_it);
  });
  if (found == sets_.end()) {
    return;
  }
  const auto pool = new_pool();
  const auto members = found->empty();
  std::deque<ResidentSet::Member> left(members.begin(), members.end());
  std::erase_if(left, is_it);
  if (left.empty()) {
    open_ = open_ && found + 1 != sets_.end();
    sets_.erase(found);
    return;
  }
  found->fill(left, ResidentSet::kAnySize);
  put_on_own(*found);
  found->set()->requestResidency();
  ++changed_;
}

void Residency::ask_for_all() {
  const auto pool = new_pool();
  std::vector<NS::SharedPtr<MTL::ResidencySet>> sets;
  {
    const std::lock_guard books(books_);
    for (const ResidentSet& set : sets_) {
      sets.push_back(set.set());
    }
  }
  for (const auto& set : sets) {
    set->requestResidency();
  }
  fresh_ = options_.now();
}

bool Residency::lapsed() const {
  return options_.supported && options_.now() - fresh_.load() > options_.interval;
}

void Residency::refresh() {
  if (heartbeat_) {
    heartbeat_->use();
  }
  if (lapsed()) {
    const std::lock_guard changes(changes_);
    if (lapsed()) {
      ask_for_all();
    }
  }
  fresh_ = options_.now();
}

void Residency::begin_step() {
  {
    const std::lock_guard books(books_);
    close();
  }
  refresh();
}

void Residency::attach(MTL::CommandQueue* queue) {
  const std::lock_guard books(books_);
  if (!options_.supported) {
    return;
  }
  auto& [kept, seen] = queues_[queue];
  if (kept && seen == changed_) {
    return;
  }
  kept = NS::RetainPtr(queue);
  seen = changed_;
  for (size_t i = 0; i < sets_.size() - (open_ ? 1 : 0); ++i) {
    sets_[i].put_on(queue);
  }
}

void Residency::attach_own(std::vector<ResidentSet::Queue> queues) {
  own_ = std::move(queues);
}

std::vector<MTL::Resource*> Residency::unattached() const {
  const std::lock_guard books(books_);
  return unattached_;
}

void Residency::end() {
  heartbeat_.reset();
  const std::lock_guard changes(changes_);
  const std::lock_guard books(books_);
  if (!sets_.empty()) {
    const auto pool = new_pool();
    for (ResidentSet& set : sets_) {
      set.empty();
    }
    sets_.clear();
  }
  waiting_.clear();
  held_.clear();
  open_ = false;
  unattached_.clear();
  queues_.clear();
  own_.clear();
}

}  // namespace quire::metal
