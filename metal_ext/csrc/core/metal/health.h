#pragma once

#include <chrono>
#include <mutex>
#include <string>

namespace quire::metal {

// Whether the device has answered everything in time. Once it has not, what is mapped is in doubt:
// nothing more is asked of it and nothing is released, because on a Mac a paging mistake can take
// the whole machine down.
class Health {
 public:
  explicit Health(std::chrono::nanoseconds timeout) : timeout_(timeout) {}

  // How long the device may take for one thing.
  std::chrono::nanoseconds timeout() const { return timeout_; }
  // Keeps the first failure for good, and throws this one as std::runtime_error.
  [[noreturn]] void fail(const std::string& what);
  // The same for something that the device did not finish within the time limit.
  [[noreturn]] void time_out(const std::string& what);
  // Throws std::runtime_error where something has failed.
  void require() const;
  std::string failure() const;

 private:
  const std::chrono::nanoseconds timeout_;
  mutable std::mutex mutex_;
  std::string failure_;
};

}  // namespace quire::metal
