#include "commands.h"

#include <algorithm>
#include <utility>

#include "foundation.h"

namespace quire::fake {
namespace {

// What a GPU beside a step copies in 2 ms. More would delay mapping points.
constexpr uint64_t kMostStagedBytes = uint64_t{8} << 20;

enum Status : uint64_t { not_enqueued = 0, committed = 2, completed = 4, failed = 5 };

const auto defined = [] {
  define("MTLCommandQueue")
      .method<&CommandQueue::command_buffer>("commandBuffer")
      .method<&CommandQueue::unretained_command_buffer>("commandBufferWithUnretainedReferences")
      .method<&CommandQueue::add_residency>("addResidencySet:")
      .method<&CommandQueue::remove_residency>("removeResidencySet:");
  define("MTLCommandBuffer")
      .method<&CommandBuffer::compute_encoder>("computeCommandEncoder")
      .method<&CommandBuffer::encode_signal>("encodeSignalEvent:value:")
      .method<&CommandBuffer::commit>("commit")
      .method<&CommandBuffer::wait_until_completed>("waitUntilCompleted")
      .method<&CommandBuffer::status>("status")
      .method<&CommandBuffer::error>("error");
  return true;
}();

}  // namespace

Object* CommandQueue::command_buffer() { return (new CommandBuffer(this, true))->autorelease(); }

Object* CommandQueue::unretained_command_buffer() {
  return (new CommandBuffer(this, false))->autorelease();
}

void CommandQueue::dealloc() {
  WorkQueue::dealloc();
  residency_.release_all();
}

CommandBuffer::CommandBuffer(CommandQueue* queue, bool retains)
    : Object("MTLCommandBuffer"), queue_(queue), retains_(retains) {
  queue_->retain();
}

void CommandBuffer::dealloc() {
  if (status_ == not_enqueued && retains_) {
    for (Object* object : used_) {
      object->release();
    }
  }
  queue_->release();
}

bool CommandBuffer::editable(const char* what) const {
  if (status_ != not_enqueued) {
    report(std::string(what) + " was encoded into a command buffer that is committed");
    return false;
  }
  return true;
}

Object* CommandBuffer::compute_encoder() {
  editable("an encoder");
  return (new ComputeEncoder(this))->autorelease();
}

void CommandBuffer::encode(
    const std::string& what, std::vector<Access> accesses, std::function<void()> body,
    std::set<const Allocation*> bound) {
  const std::lock_guard lock(Machine::current().mutex);
  if (editable("a command")) {
    commands_.push_back({.what = what,
                         .accesses = std::move(accesses),
                         .body = std::move(body),
                         .bound = std::move(bound)});
  }
}

void CommandBuffer::encode_signal(Event* event, uint64_t value) {
  const std::lock_guard lock(Machine::current().mutex);
  if (editable("a signal")) {
    ++event->queued;
    commands_.push_back({.what = "a signal", .event = event, .value = value});
  }
}

void CommandBuffer::use(Object* object) {
  if (retains_) {
    object->retain();
  }
  used_.push_back(object);
}

bool CommandBuffer::uses(const Object* object) const {
  return std::any_of(
             touched_.begin(), touched_.end(),
             [object](const Touched& t) { return t.buffer == object || t.memory == object; }) ||
         std::find(used_.begin(), used_.end(), object) != used_.end();
}

bool CommandBuffer::may_touch(const Allocation* memory) const {
  return uses(memory) || std::any_of(sets_.begin(), sets_.end(), [memory](const ResidencySet* set) {
    return set->holds(memory);
  });
}

bool CommandBuffer::reaches(const Buffer* buffer, uint64_t page) const {
  return std::any_of(touched_.begin(), touched_.end(), [&](const Touched& t) {
    return t.buffer == buffer && t.page == page;
  });
}

bool CommandBuffer::writes(const Allocation* memory, uint64_t page) const {
  return std::any_of(touched_.begin(), touched_.end(), [&](const Touched& t) {
    return t.write && t.memory == memory && t.memory_page == page;
  });
}

bool CommandBuffer::has(const ResidencySet* set) const {
  return sets_.contains(const_cast<ResidencySet*>(set));
}

// What is in no set is found when the command runs.
void CommandBuffer::check_residency(const Command& command, const Touched& page) const {
  const QueueResidency& residency = queue_->residency();
  for (const Allocation* memory : {static_cast<const Allocation*>(page.buffer),
                                   static_cast<const Allocation*>(page.memory)}) {
    if (!command.bound.contains(memory) && residency.holds(memory) &&
        !residency.has_resident(memory)) {
      report(
          command.what + " was committed when nobody had used or asked for what it reaches "
          "since a second");
    }
  }
}

// Checks that commands which may run together do not conflict. No command writes a page that is
// mapped in several buffers. No other queue touches a page that a command writes, and no command
// touches it through another address.
void CommandBuffer::check_page(const std::string& what, const Touched& page) const {
  if (page.write && page.buffer->sparse()) {
    const auto& places = static_cast<const Heap*>(page.memory)->addresses_of_page;
    const auto at = places.find(page.memory_page);
    const auto elsewhere = [&](uint64_t address) {
      return address - page.buffer->gpu_address() >= page.buffer->length();
    };
    if (at != places.end() && std::any_of(at->second.begin(), at->second.end(), elsewhere)) {
      report(what + " writes a page that stands in another buffer, too");
    }
  }
  for (const CommandBuffer* other : Machine::current().in_flight) {
    for (const Touched& theirs : other->touched_) {
      const bool same = theirs.memory == page.memory && theirs.memory_page == page.memory_page;
      const bool same_address = theirs.buffer == page.buffer && theirs.page == page.page;
      if (same && (page.write || theirs.write) && (other->queue_ != queue_ || !same_address)) {
        report(what + " touches a page that a command in flight touches, and one of them writes");
        return;
      }
    }
  }
}

bool CommandBuffer::stages(const Buffer* buffer) const { return staged_.contains(buffer); }

// Notes copies from or to a plain buffer: the CPU must leave it alone until they are complete.
void CommandBuffer::check_staged(const std::string& what, uint64_t bytes, const Touched& first) {
  if (what == "copy_blocks" && !first.buffer->sparse()) {
    staged_.insert(first.buffer);
    staged_bytes_ += bytes;
  }
}

void CommandBuffer::check() {
  for (const Command& command : commands_) {
    for (const Access& access : command.accesses) {
      const std::vector<Touched> touched = touched_by(access, command.what);
      if (!touched.empty()) {
        check_staged(command.what, access.bytes, touched.front());
      }
      for (const Touched& page : touched) {
        check_page(command.what, page);
        check_residency(command, page);
        touched_.push_back(page);
      }
    }
  }
}

void CommandBuffer::check_mappings() const {
  if (Machine::current().maps_beside_commands()) {
    return;
  }
  for (const ResidencySet* set : sets_) {
    for (const Allocation* memory : set->resident()) {
      if (memory->queued > 0) {
        report("a command was committed that may touch what a queued mapping is about to change");
        return;
      }
    }
  }
}

void CommandBuffer::commit() {
  Machine& machine = Machine::current();
  const std::lock_guard lock(machine.mutex);
  if (!editable("a second commit")) {
    return;
  }
  check();
  if (staged_bytes_ > kMostStagedBytes) {
    report("a command copies " + std::to_string(staged_bytes_) + " staged bytes at once");
  }
  ++machine.commits;
  sets_ = queue_->residency().sets();
  check_mappings();
  for (ResidencySet* set : sets_) {
    set->use();
  }
  status_ = committed;
  failure_ = machine.take_failure();
  machine.in_flight.insert(this);
  retain();  // until it has completed
  for (const Command& command : commands_) {
    queue_->enqueue(command.what, nullptr, [this, &command] { run(command); });
  }
  queue_->enqueue("the end of a command buffer", nullptr, [this] { complete(); });
}

void CommandBuffer::run(const Command& command) {
  if (command.event != nullptr) {
    --command.event->queued;
    if (failure_.empty()) {
      command.event->signal(command.value);
      if (&command == &commands_.back()) {
        leave();  // nothing comes behind the last signal
      }
    }
    return;
  }
  for (const Access& access : command.accesses) {
    for (const Touched& page : touched_by(access, command.what)) {
      const bool bound = command.bound.contains(page.buffer);
      if (!bound && !queue_->residency().holds(page.buffer)) {
        report(command.what + " reaches a buffer that is not resident on its queue");
      }
      if (page.buffer->sparse() && !queue_->residency().holds(page.memory)) {
        report(command.what + " reaches a heap that is not resident on its queue");
      }
    }
  }
  if (failure_.empty() || Machine::current().random(2) == 0) {
    command.body();
  }
}

void CommandBuffer::leave() {
  for (ResidencySet* set : sets_) {
    set->use();
  }
  sets_.clear();
  Machine::current().in_flight.erase(this);
}

void CommandBuffer::complete() {
  status_ = failure_.empty() ? completed : failed;
  leave();
  if (retains_) {
    for (Object* object : used_) {
      object->release();
    }
  }
  Machine::current().changed();
  release();
}

void CommandBuffer::wait_until_completed() {
  const bool done = Machine::current().wait_until(
      [this] { return status_ >= completed; }, std::chrono::hours(1));
  if (!done) {
    report("deadlock: a command buffer never completes");
  }
}

uint64_t CommandBuffer::status() const {
  const std::lock_guard lock(Machine::current().mutex);
  return status_;
}

Object* CommandBuffer::error() const {
  return failure_.empty() ? nullptr : (new Error(failure_))->autorelease();
}

}  // namespace quire::fake
