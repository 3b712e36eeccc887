#include "core/metal/heartbeat.h"

#include <utility>

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
    { const std::lock_guard lock(mutex_); }  // it has come to its wait
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

}  // namespace quire::metal
