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
// system. Every operation has a ticket; tickets rise by one and complete in order.
class Mapper {
 public:
  Mapper();
  ~Mapper();  // finishes all submitted operations

  uint64_t submit(std::function<void()> operation);
  // Submits an operation that may be refused: a std::system_error means that nothing has changed.
  uint64_t attempt(std::function<void()> operation);
  // True, once, if the system refused the attempt. Throws std::logic_error if the ticket is not
  // complete.
  bool refused(uint64_t ticket);
  // The newest completed ticket.
  uint64_t completed() const;
  // False when the timeout passes first.
  bool wait(uint64_t ticket, std::chrono::nanoseconds timeout) const;
  // The message of the first failure, or empty. After a failure mappings are in doubt, and the
  // caller must stop serving.
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
