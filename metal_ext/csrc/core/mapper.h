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
#include <utility>

namespace quire {

// Runs changes of mappings in order on a thread of its own, so that the engine does not wait for
// the system. Each operation has a ticket: 1 for the first one submitted, 2 for the next.
class Mapper {
 public:
  Mapper();
  ~Mapper();  // finishes all submitted operations

  uint64_t submit(std::function<void()> operation) { return enqueue(std::move(operation), false); }
  // Like submit(), but if the operation throws std::system_error, refused(ticket) returns true.
  uint64_t attempt(std::function<void()> operation) { return enqueue(std::move(operation), true); }
  // Returns true, once per ticket, if the system refused the operation with this ticket. Throws
  // std::logic_error if the operation is not complete.
  bool refused(uint64_t ticket);
  uint64_t completed() const;
  // Returns false if the timeout passes before the operation completes.
  bool wait(uint64_t ticket, std::chrono::nanoseconds timeout) const;
  // Returns the message of the first failed operation, or "". After a failure, mappings may be
  // wrong, and serving must stop.
  std::string failure() const;

 private:
  struct Operation {
    std::function<void()> run;
    bool may_be_refused;
  };

  uint64_t enqueue(std::function<void()> run, bool may_be_refused);
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
