#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace quire {

// Takes memory away on a thread of its own, in order, so that the engine never waits for the
// system. Every operation has a ticket; tickets rise by one and complete in order.
class Mapper {
 public:
  Mapper();
  ~Mapper();  // finishes what was submitted

  uint64_t submit(std::function<void()> operation);
  // The newest ticket such that it and all before it are done.
  uint64_t completed() const;
  // False when the time passed first.
  bool wait(uint64_t ticket, std::chrono::nanoseconds timeout) const;
  // What the first operation that failed said; empty while none has. A failed operation leaves
  // mappings in doubt: the caller must stop serving.
  std::string failure() const;

 private:
  void run();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t submitted_ = 0;
  uint64_t completed_ = 0;
  bool stopping_ = false;
  std::string failure_;
  std::thread thread_;
};

}  // namespace quire
