#pragma once

#include <Metal/Metal.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace quire::metal {

// Numbers the steps on the device; a step's number is its epoch. The step's last command buffer
// signals the epoch through a shared event. Any thread may call a method that names no thread.
class Epochs {
  struct Resume {
    void operator()(Epochs* epochs) const { epochs->resume(); }
  };

 public:
  // While a Pause lives, no step is in flight and none starts.
  using Pause = std::unique_ptr<Epochs, Resume>;

  // Throws std::system_error(ENOMEM) when the device gives no event.
  explicit Epochs(MTL::Device* device);

  // Starts a step on the engine's thread and returns its epoch. Throws std::logic_error in a pause.
  uint64_t start();
  uint64_t newest() const;
  // The event that the step's last command signals, with the epoch as value.
  MTL::SharedEvent* event() const { return event_.get(); }
  // Returns the newest epoch up to which all steps are complete.
  uint64_t completed() const;
  // Waits for a step. Returns false when the timeout passes first, after at least one check.
  bool wait(uint64_t epoch, std::chrono::nanoseconds timeout) const;
  // Counts a failed step as complete. Throws std::logic_error if no step has this epoch.
  void abandon(uint64_t epoch);
  // Runs the body while no step is in flight and none starts; returns false if steps never pause.
  bool while_idle(std::chrono::nanoseconds timeout, const std::function<void()>& body);
  // Keeps steps from starting. Throws std::logic_error with the text `what` if one is in flight.
  Pause pause(const std::string& what);

 private:
  void resume();
  uint64_t completed_locked() const;

  NS::SharedPtr<MTL::SharedEvent> event_;
  mutable std::mutex mutex_;
  uint64_t started_ = 0;
  size_t pauses_ = 0;
  mutable uint64_t completed_ = 0;
  mutable std::set<uint64_t> abandoned_;  // abandoned epochs above completed_
};

}  // namespace quire::metal
