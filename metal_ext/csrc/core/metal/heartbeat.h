#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace quire::metal {

using Clock = std::function<std::chrono::steady_clock::time_point()>;

// Calls a function again and again while something is in use, and for a while after, on a thread of
// its own.
class Heartbeat {
 public:
  // interval: between calls. keep: how long after the last use.
  Heartbeat(
      std::chrono::nanoseconds interval, std::chrono::nanoseconds keep, Clock now,
      std::function<void()> beat);
  // Waits for a call that is being made.
  ~Heartbeat();

  // Any thread; waits for nothing.
  void use();

 private:
  bool in_use() const { return now_() - last_use_.load() < keep_; }
  void run();

  const std::chrono::nanoseconds interval_;
  const std::chrono::nanoseconds keep_;
  const Clock now_;
  const std::function<void()> beat_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::chrono::steady_clock::time_point> last_use_;
  std::atomic<bool> sleeps_{false};  // until the next use
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace quire::metal
