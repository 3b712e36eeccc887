#pragma once

#include <Metal/Metal.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace quire::metal {

// Numbers the steps on the device. The number of a step is its epoch. The step's last command
// buffer signals the epoch through a shared event. Any thread may call methods, except start().
class Epochs {
  struct Resume {
    void operator()(Epochs* epochs) const { epochs->resume(); }
  };

 public:
  // While a Pause exists, no step runs and none can start.
  using Pause = std::unique_ptr<Epochs, Resume>;

  explicit Epochs(MTL::Device* device);

  // Starts a step on the engine's thread; returns its epoch. Throws std::logic_error in a Pause.
  uint64_t start();
  uint64_t newest() const;
  // Returns the event that each step's last command sets to the step's epoch.
  MTL::SharedEvent* event() const { return event_.get(); }
  // Returns the newest epoch up to which all steps are complete.
  uint64_t completed() const;
  // Waits for a step. Returns false if the timeout passes first, after at least one check.
  bool wait(uint64_t epoch, std::chrono::nanoseconds timeout) const;
  // Counts a failed step as complete. Throws std::logic_error if no step has this epoch.
  void abandon(uint64_t epoch);
  // Calls body while no step runs and none can start. Returns false if steps run all the time.
  bool while_idle(std::chrono::nanoseconds timeout, const std::function<void()>& body);
  // Keeps steps from starting. Waits up to a second for the signal of the last step, which the
  // engine may have read already. Then throws std::logic_error with the text `what` if a step runs.
  Pause pause(const std::string& what);
  // Returns how often pause() has waited.
  uint64_t late_signals() const { return late_signals_; }

 private:
  void resume();
  uint64_t completed_locked() const;

  NS::SharedPtr<MTL::SharedEvent> event_;
  mutable std::mutex mutex_;
  uint64_t started_ = 0;
  std::atomic<uint64_t> late_signals_ = 0;
  size_t pauses_ = 0;
  mutable uint64_t completed_ = 0;
  mutable std::set<uint64_t> abandoned_;  // abandoned epochs above completed_
};

}  // namespace quire::metal
