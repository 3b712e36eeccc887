#include "machine.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <utility>

#include "object.h"
#include "work_queue.h"

namespace quire::fake {
namespace {

Machine*& newest() {
  static Machine* machine = nullptr;
  return machine;
}

// Behind what is not mapped there is nothing: the process ends, as a GPU fault ends a command.
void on_bad_address(int, siginfo_t* info, void*) {
  char text[128];
  const int length = std::snprintf(
      text, sizeof text, "fake Metal: access to memory without a mapping at %p\n", info->si_addr);
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, static_cast<size_t>(length));
  _exit(77);
}

constexpr size_t kMostCorpses = 100'000;

}  // namespace

Machine& Machine::current() {
  if (newest() == nullptr) {
    Options options;
    options.background = true;
    new Machine(options);  // for the life of the process
  }
  return *newest();
}

Machine::Machine(Options options)
    : options_(std::move(options)),
      random_(options_.seed),
      maps_beside_commands_(options_.maps_beside_commands) {
  newest() = this;
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = &on_bad_address;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  if (options_.background) {
    thread_ = std::thread([this] {
      std::unique_lock lock(mutex);
      while (!stopping_) {
        if (!tick_once()) {
          changed_.wait_for(lock, std::chrono::milliseconds(1));
        } else if (random(8) == 0) {
          lock.unlock();
          std::this_thread::yield();
          lock.lock();
        }
      }
    });
  }
}

Machine::~Machine() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex);
      stopping_ = true;
    }
    changed();
    thread_.join();
  }
  for (Object* object : alive_) {
    corpses_.push_back(object);
  }
  while (!corpses_.empty()) {
    drop_corpses(corpses_.size());
  }
  newest() = nullptr;
}

bool Machine::lacks(const std::string& name, const char* selector) const {
  return !options_.lacks.empty() && options_.lacks.contains(name + " " + selector);
}

void Machine::refuse_after(const std::string& selector, int made, int times) {
  const std::lock_guard lock(mutex);
  refusals_[selector] = {made, times};
}

bool Machine::refuses(const std::string& selector) {
  const std::lock_guard lock(mutex);
  const auto found = refusals_.find(selector);
  if (found == refusals_.end()) {
    return false;
  }
  Refusals& refusals = found->second;
  if (refusals.made_before > 0) {
    --refusals.made_before;
    return false;
  }
  return refusals.times-- > 0;
}

void Machine::report(const std::string& mistake) {
  const std::lock_guard lock(mutex);
  errors_.push_back(mistake);
}

std::vector<std::string> Machine::errors() const {
  const std::lock_guard lock(const_cast<std::recursive_mutex&>(mutex));
  return errors_;
}

std::vector<std::string> Machine::take_errors() {
  const std::lock_guard lock(mutex);
  return std::exchange(errors_, {});
}

std::map<std::string, size_t> Machine::alive() const {
  const std::lock_guard lock(const_cast<std::recursive_mutex&>(mutex));
  std::map<std::string, size_t> counts;
  for (const Object* object : alive_) {
    ++counts[object->name()];
  }
  return counts;
}

bool Machine::tick(unsigned times) {
  const std::lock_guard lock(mutex);
  bool any = false;
  for (unsigned i = 0; i < times && tick_once(); ++i) {
    any = true;
  }
  return any;
}

// The order among queues is nobody's promise: any of them that can may go on.
bool Machine::tick_once() {
  std::vector<WorkQueue*> ready;
  for (WorkQueue* queue : queues_) {
    if (!frozen_ && queue->ready()) {
      ready.push_back(queue);
    }
  }
  if (ready.empty()) {
    return false;
  }
  ready[random(ready.size())]->step();
  changed();
  return true;
}

void Machine::run() {
  const std::lock_guard lock(mutex);
  while (tick_once()) {
  }
  for (const WorkQueue* queue : queues_) {
    if (!queue->idle()) {
      report("deadlock: nothing will ever let go on: " + queue->next());
    }
  }
}

void Machine::freeze(bool frozen) {
  const std::lock_guard lock(mutex);
  frozen_ = frozen;
}

void Machine::stall_mappings() {
  const std::lock_guard lock(mutex);
  mappings_stalled_ = true;
}

void Machine::allow_maps_beside_commands(bool allowed) {
  const std::lock_guard lock(mutex);
  maps_beside_commands_ = allowed;
}

void Machine::while_waiting(std::function<void()> hook) {
  const std::lock_guard lock(mutex);
  hook_ = std::move(hook);
}

void Machine::fail_next_commands(const std::string& words) {
  const std::lock_guard lock(mutex);
  failure_ = words;
}

std::string Machine::take_failure() { return std::exchange(failure_, ""); }

bool Machine::wait_until(
    const std::function<bool()>& done, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex);
  if (options_.background) {
    return changed_.wait_for(lock, limit, done);
  }
  while (!done()) {
    if (hook_ && !in_hook_) {
      in_hook_ = true;
      lock.unlock();
      hook_();
      lock.lock();
      in_hook_ = false;
    }
    if (!tick_once()) {
      return done();
    }
  }
  return true;
}

void Machine::pass(std::chrono::nanoseconds time) {
  const std::lock_guard lock(mutex);
  now += time;
}

std::chrono::steady_clock::time_point Machine::time() const {
  const std::lock_guard lock(const_cast<std::recursive_mutex&>(mutex));
  return std::chrono::steady_clock::time_point(now);
}

void Machine::describe_kernel(const std::string& host_name, Describe describe) {
  const std::lock_guard lock(mutex);
  descriptions_[host_name] = std::move(describe);
}

const Machine::Describe* Machine::description(const std::string& host_name) const {
  const auto found = descriptions_.find(host_name);
  return found == descriptions_.end() ? nullptr : &found->second;
}

uint64_t Machine::random(uint64_t below) { return random_() % below; }

void Machine::born(Object* object) {
  const std::lock_guard lock(mutex);
  alive_.insert(object);
}

void Machine::died(Object* object) {
  const std::lock_guard lock(mutex);
  alive_.erase(object);
  corpses_.push_back(object);
  // Not those that have just died: somebody's stack may still lead through them.
  if (corpses_.size() > kMostCorpses) {
    drop_corpses(kMostCorpses / 2);
  }
}

void Machine::drop_corpses(size_t count) {
  const auto end = corpses_.begin() + static_cast<std::ptrdiff_t>(count);
  const std::vector<Object*> oldest(corpses_.begin(), end);
  // What these still hold dies with them, and comes back here.
  corpses_.erase(corpses_.begin(), end);
  for (const Object* object : oldest) {
    delete object;
  }
}

void Machine::remove_queue(WorkQueue* queue) { std::erase(queues_, queue); }

bool Machine::charge(uint64_t bytes) {
  if (bytes > options_.memory_bytes - charged_) {
    return false;
  }
  charged_ += bytes;
  return true;
}

}  // namespace quire::fake
