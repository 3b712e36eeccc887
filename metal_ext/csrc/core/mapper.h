#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>

namespace quire {

// Changes mappings on a thread of its own, in order, so that the engine never waits for the system.
// Every operation has a ticket; tickets rise by one and complete in order.
class Mapper {
 public:
  Mapper();
  ~Mapper();  // finishes what was submitted

  uint64_t submit(std::function<void()> operation);
  // An operation that the system may refuse: a std::system_error that it throws says that nothing
  // was changed, and is no failure.
  uint64_t attempt(std::function<void()> operation);
  // True where the system refused that attempt; only the first call returns it. Throws
  // std::logic_error when the ticket is not completed.
  bool refused(uint64_t ticket);
  // The newest ticket such that it and all before it are done.
  uint64_t completed() const;
  // False when the time passed first.
  bool wait(uint64_t ticket, std::chrono::nanoseconds timeout) const;
  // The words of the first operation that failed; empty while none has. A failed operation leaves
  // mappings in doubt: the caller must stop serving.
  std::string failure() const;

 private:
  struct Operation {
    std::function<void()> run;
    bool may_be_refused;
  };

  uint64_t enqueue(Operation operation);
  void run();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Operation> queue_;
  uint64_t submitted_ = 0;
  uint64_t completed_ = 0;
  std::unordered_set<uint64_t> refused_;
  bool stopping_ = false;
  std::string failure_;
  std::thread thread_;
};

}  // namespace quire
