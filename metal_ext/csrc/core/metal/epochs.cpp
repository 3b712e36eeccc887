#include "core/metal/epochs.h"

#include <algorithm>
#include <stdexcept>

#include "core/checked.h"
#include "core/metal/gpu.h"

// Implements the numbering of steps: starts, waits, pauses and abandoned steps.
namespace quire::metal {
namespace {

// The time between checks for an abandoned step, which signals no event that would end a wait.
constexpr std::chrono::milliseconds kLookAgain{20};
// The longest time from the end of a step, as MLX sees it, to the signal of the step's epoch.
constexpr std::chrono::seconds kLateSignal{1};

}  // namespace

Epochs::Epochs(MTL::Device* device) : event_(make_shared_event(device)) {}

uint64_t Epochs::start() {
  const std::lock_guard lock(mutex_);
  // Rule: in a backend that maps only between steps, no step starts during a Pause.
  require<std::logic_error>(pauses_ == 0, "a step cannot begin before mappings are finished");
  return ++started_;
}

Epochs::Pause Epochs::pause(const std::string& what) {
  if (const uint64_t newest = this->newest(); completed() < newest) {
    ++late_signals_;
    wait(newest, kLateSignal);
  }
  const std::lock_guard lock(mutex_);
  const uint64_t completed = completed_locked();
  require<std::logic_error>(
      completed >= started_, what, " while epoch ", completed + 1, " is in flight");
  ++pauses_;
  return Pause(this);
}

void Epochs::resume() {
  const std::lock_guard lock(mutex_);
  --pauses_;
}

uint64_t Epochs::newest() const {
  const std::lock_guard lock(mutex_);
  return started_;
}

uint64_t Epochs::completed() const {
  const std::lock_guard lock(mutex_);
  return completed_locked();
}

uint64_t Epochs::completed_locked() const {
  const uint64_t signalled = event_->signaledValue();
  require<std::logic_error>(signalled <= started_, "epoch ", signalled,
                            " was signalled, but the newest is ", started_);
  completed_ = std::max(completed_, signalled);
  while (abandoned_.erase(completed_ + 1) > 0) {
    ++completed_;
  }
  abandoned_.erase(abandoned_.begin(), abandoned_.upper_bound(completed_));
  return completed_;
}

bool Epochs::wait(uint64_t epoch, std::chrono::nanoseconds timeout) const {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (completed() < epoch) {
    const auto left = deadline - std::chrono::steady_clock::now();
    wait_for_value(event_.get(), epoch, std::min<std::chrono::nanoseconds>(left, kLookAgain));
    if (left <= left.zero()) {
      return completed() >= epoch;
    }
  }
  return true;
}

void Epochs::abandon(uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  require<std::logic_error>(
      epoch > 0 && epoch <= started_, "epoch ", epoch, " was never started");
  // The event stays as it is: setting it would also complete earlier steps, which may still run.
  if (epoch > completed_locked()) {
    abandoned_.insert(epoch);
  }
}

bool Epochs::while_idle(
    std::chrono::nanoseconds timeout, const std::function<void()>& body) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  do {
    if (!wait(newest(), deadline - std::chrono::steady_clock::now())) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    if (completed_locked() == started_) {
      body();
      return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace quire::metal
