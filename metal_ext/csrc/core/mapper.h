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

// Runs changes of mappings in order on a thread of its own, so that the engine never waits for the
// system. Every operation has a number, its ticket, one above the last. Operations complete in
// order.
class Mapper {
 public:
  Mapper();
  ~Mapper();  // finishes all submitted operations

  uint64_t submit(std::function<void()> operation);
  // Submits an operation that may be refused: a std::system_error means that nothing has changed.
  uint64_t attempt(std::function<void()> operation);
  // Returns true, once, if the system refused the operation with this ticket. Throws
  // std::logic_error if the operation is not complete.
  bool refused(uint64_t ticket);
  // Returns the ticket of the newest completed operation.
  uint64_t completed() const;
  // Returns false when the timeout passes before the operation completes.
  bool wait(uint64_t ticket, std::chrono::nanoseconds timeout) const;
  // Returns the message of the first failure, or an empty string. After a failure the mappings are
  // unknown: serving must stop.
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
