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

// A number that rises when the device has finished a step. Started on the host, signalled by the
// last command buffer of the step, through a shared event. Any thread, except where one is named.
class Epochs {
  struct Resume {
    void operator()(Epochs* epochs) const { epochs->resume(); }
  };

 public:
  // While one lives, no epoch is in flight and none starts.
  using Pause = std::unique_ptr<Epochs, Resume>;

  // Throws std::system_error(ENOMEM) where the device gives no event.
  explicit Epochs(MTL::Device* device);

  // Opens the next step's epoch: 1, 2, ... Engine's thread. Throws std::logic_error in a pause.
  uint64_t start();
  uint64_t newest() const;
  // The event to encode a signal of, with the epoch as its value, behind a step's last command.
  MTL::SharedEvent* event() const { return event_.get(); }
  // All epochs up to this one are complete.
  uint64_t completed() const;
  // False when the time passed first. Looks once at least: this thread may not have run meanwhile.
  bool wait(uint64_t epoch, std::chrono::nanoseconds timeout) const;
  // The step failed and nothing of it runs any more: counts as complete. Throws std::logic_error
  // for an epoch that was never started.
  void abandon(uint64_t epoch);
  // Runs the body while no epoch is in flight and none can start; false, without running it, when
  // there was always one until the time had passed.
  bool while_idle(std::chrono::nanoseconds timeout, const std::function<void()>& body);
  // Throws std::logic_error that names the epoch that is in flight: `what` "cannot be ...".
  Pause pause(const std::string& what);

 private:
  void resume();
  uint64_t completed_locked() const;

  NS::SharedPtr<MTL::SharedEvent> event_;
  mutable std::mutex mutex_;
  uint64_t started_ = 0;
  size_t pauses_ = 0;
  mutable uint64_t completed_ = 0;
  mutable std::set<uint64_t> abandoned_;  // those above completed_
};

}  // namespace quire::metal
