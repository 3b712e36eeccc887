#include "threadgroup.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>

namespace msl {

thread_local Threadgroup* Threadgroup::current_ = nullptr;

Threadgroup& Threadgroup::of_this_thread() {
  thread_local Threadgroup one;
  current_ = &one;
  return one;
}

void Threadgroup::prepare(const Place& first, uint32_t order) {
  const Size size = first.threadgroup_size;
  threads_ = size.x * size.y * size.z;
  while (lanes_.size() < threads_) {
    lanes_.push_back({{}, std::make_unique<Fiber>(lanes_.size())});
  }
  const uint32_t groups = (threads_ + kSimdWidth - 1) / kSimdWidth;
  simdgroups_.assign(groups, {});
  for (uint32_t i = 0; i < threads_; ++i) {
    Place& place = lanes_[i].place;
    place = first;
    place.in_threadgroup = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    place.index = i;
    place.simdgroup = i / kSimdWidth;
    place.lane = i % kSimdWidth;
    place.simdgroups = groups;
    simdgroups_[place.simdgroup].lanes |= 1u << place.lane;
    lanes_[i].fiber->start(lane_main);
  }
  order_.resize(groups);
  std::iota(order_.begin(), order_.end(), 0u);
  if (order != 0) {
    std::shuffle(order_.begin(), order_.end(), std::minstd_rand(order));
  }
  memory_.clear();
  memory_bytes_ = 0;
  blocked_ = 0;
  returned_ = 0;
}

void Threadgroup::run(const Dispatch& dispatch, const Place& first, uint32_t order) {
  dispatch_ = &dispatch;
  prepare(first, order);
  running_ = order_[0] * kSimdWidth;
  host_.begin();
  Fiber::change(outside_, *lanes_[running_].fiber, false);
  host_.join();
  if (returned_ != simdgroups_.size()) {
    fail("the executor has lost simdgroups");
  }
}

void Threadgroup::lane_main() {
  Threadgroup& group = current();
  group.lanes_[group.running_].fiber->arrived();
  group.host_.enter();
  group.dispatch_->body(group.dispatch_->context);
  group.host_.end();
  const Place& place = group.place();
  Simdgroup& simdgroup = group.simdgroups_[place.simdgroup];
  if (simdgroup.waiting != 0) {
    fail("returns while lanes of its simdgroup wait at %s in line %u", simdgroup.operation.name,
         simdgroup.operation.line);
  }
  simdgroup.returned |= 1u << place.lane;
  if (simdgroup.returned == simdgroup.lanes) {
    ++group.returned_;
    if (group.blocked_ != 0) {
      fail("returns while other simdgroups wait at %s in line %u", group.waits_at_.name,
           group.waits_at_.line);
    }
  }
  group.leave(true);
  std::abort();  // nobody comes back to a lane that has returned
}

uint32_t Threadgroup::runnable(uint32_t simdgroup, uint32_t lane) const {
  const Simdgroup& group = simdgroups_[simdgroup];
  const uint32_t ready = group.lanes & ~group.returned & ~group.waiting;
  if (group.blocked || ready == 0) {
    return kMaxThreads;
  }
  const uint32_t behind = lane + 1 < kSimdWidth ? ready >> (lane + 1) << (lane + 1) : 0;
  return simdgroup * kSimdWidth +
         static_cast<uint32_t>(__builtin_ctz(behind != 0 ? behind : ready));
}

void Threadgroup::leave(bool ends) {
  const uint32_t from = running_;
  uint32_t next = runnable(from / kSimdWidth, from % kSimdWidth);
  for (size_t i = 0; next == kMaxThreads && i < order_.size(); ++i) {
    next = runnable(order_[i], kSimdWidth - 1);
  }
  if (next == kMaxThreads) {
    // Simdgroups that wait for each other have been told apart before: only the end is left.
    Fiber::change(*lanes_[from].fiber, outside_, ends);
    return;
  }
  running_ = next;
  Fiber::change(*lanes_[from].fiber, *lanes_[next].fiber, ends);
}

void Threadgroup::require_same(
    const Operation& mine, const Operation& other, const char* of) const {
  if (!(mine == other)) {
    fail("comes to %s in line %u while others of its %s wait at %s in line %u", mine.name,
         mine.line, of, other.name, other.line);
  }
}

Threadgroup::Meeting& Threadgroup::meet(
    const Operation& operation, Word word, bool& completes, Reduce function) {
  const Place& at = lanes_[running_].place;
  Simdgroup& simdgroup = simdgroups_[at.simdgroup];
  if (simdgroup.waiting == 0) {
    simdgroup.operation = operation;
  }
  require_same(operation, simdgroup.operation, "simdgroup");
  if (simdgroup.returned != 0) {
    fail("comes to %s in line %u, where lanes of its simdgroup have returned", operation.name,
         operation.line);
  }
  Meeting& meeting = simdgroup.meeting[simdgroup.meetings % 2];
  meeting.words[at.lane] = word;
  simdgroup.waiting |= 1u << at.lane;
  completes = simdgroup.waiting == simdgroup.lanes;
  if (completes) {
    if (function != nullptr) {
      meeting.result = function(meeting.words, simdgroup.lanes);
    }
    simdgroup.waiting = 0;
    ++simdgroup.meetings;
  } else {
    leave(false);
  }
  return meeting;
}

Word Threadgroup::reduce(const Operation& operation, Word word, Reduce function) {
  bool completes;
  return meet(operation, word, completes, function).result;
}

Word Threadgroup::take(const Operation& operation, Word word, unsigned mask) {
  bool completes;
  const Meeting& meeting = meet(operation, word, completes);
  const unsigned lane = place().lane ^ mask;
  const uint32_t lanes = simdgroups_[place().simdgroup].lanes;
  if (lane >= kSimdWidth || (lanes >> lane & 1) == 0) {
    fail("%s in line %u takes from lane %u, which does not exist", operation.name, operation.line,
         lane);
  }
  return meeting.words[lane];
}

void Threadgroup::simdgroup_barrier(const Operation& operation, bool orders_memory) {
  bool completes;
  Simdgroup& simdgroup = simdgroups_[place().simdgroup];
  const uint64_t time = simdgroup.meetings;
  simdgroup.barrier.come(orders_memory, time);
  meet(operation, 0, completes);
  simdgroup.barrier.go_on(orders_memory, time);
}

void Threadgroup::threadgroup_barrier(const Operation& operation, bool orders_memory) {
  bool completes;
  const uint64_t time = barriers_;
  barrier_.come(orders_memory, time);
  meet(operation, 0, completes);
  if (completes) {
    if (blocked_ == 0) {
      waits_at_ = operation;
    }
    require_same(operation, waits_at_, "threadgroup");
    if (returned_ != 0) {
      fail("comes to %s in line %u, where other simdgroups have returned", operation.name,
           operation.line);
    }
    simdgroups_[place().simdgroup].blocked = true;
    if (++blocked_ == simdgroups_.size()) {
      blocked_ = 0;
      ++barriers_;
      for (Simdgroup& simdgroup : simdgroups_) {
        simdgroup.blocked = false;
      }
    } else {
      leave(false);
    }
  }
  barrier_.go_on(orders_memory, time);
}

void* Threadgroup::memory(unsigned key, size_t bytes) {
  for (const Variable& variable : memory_) {
    if (variable.key == key) {
      races::receive(variable.bytes.get());
      return variable.bytes.get();
    }
  }
  memory_bytes_ += (bytes + 15) / 16 * 16;
  if (memory_bytes_ > kThreadgroupBytes) {
    fail("takes %zu bytes of threadgroup memory; there are %zu", memory_bytes_, kThreadgroupBytes);
  }
  // A block of its own per variable, so that AddressSanitizer sees its ends.
  memory_.push_back({key, {static_cast<char*>(std::malloc(bytes)), std::free}});
  char* const memory = memory_.back().bytes.get();
  std::memset(memory, 0xff, bytes);
  races::give(memory);
  return memory;
}

}  // namespace msl
