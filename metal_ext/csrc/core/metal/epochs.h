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

// Numbers the steps on the device. The host starts an epoch; the step's last command buffer signals
// it through a shared event. Any thread, unless a method names one.
class Epochs {
  struct Resume {
    void operator()(Epochs* epochs) const { epochs->resume(); }
  };

 public:
  // No epoch is in flight or starts while a Pause lives.
  using Pause = std::unique_ptr<Epochs, Resume>;

  // Throws std::system_error(ENOMEM) when the device gives no event.
  explicit Epochs(MTL::Device* device);

  // Opens the next epoch: 1, 2, ... Engine's thread. Throws std::logic_error during a pause.
  uint64_t start();
  uint64_t newest() const;
  // The event that the step's last command signals, with the epoch as value.
  MTL::SharedEvent* event() const { return event_.get(); }
  // The newest epoch such that it and all earlier ones are complete.
  uint64_t completed() const;
  // Returns false when the timeout passes first. The epoch is checked at least once.
  bool wait(uint64_t epoch, std::chrono::nanoseconds timeout) const;
  // Counts a failed step as complete. Throws std::logic_error for an unknown epoch.
  void abandon(uint64_t epoch);
  // Runs the body while no epoch is in flight or starts. Returns false if no such moment came in
  // time.
  bool while_idle(std::chrono::nanoseconds timeout, const std::function<void()>& body);
  // Keeps epochs from starting. Throws std::logic_error with `what` while one is in flight.
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
