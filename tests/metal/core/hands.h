#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/mapper.h"

namespace quire::metal {

// Who does what the engine leaves to the mapper: the mapper with its thread, or, where a life is to
// be the same every time, the test's own thread whenever it comes to it.
class Hands {
 public:
  virtual ~Hands() = default;
  virtual uint64_t attempt(std::function<void()> operation) = 0;
  virtual uint64_t completed() const = 0;
  virtual bool refused(uint64_t ticket) = 0;
  virtual std::string failure() const = 0;
  // Whether something is being done right now.
  virtual bool working() const = 0;
  // Does one thing that is left, or lets the thread go on; false where there is nothing.
  virtual bool work() = 0;
};

class ThreadHands final : public Hands {
 public:
  uint64_t attempt(std::function<void()> operation) override {
    return submitted_ = mapper_.attempt(std::move(operation));
  }
  uint64_t completed() const override { return mapper_.completed(); }
  bool refused(uint64_t ticket) override { return mapper_.refused(ticket); }
  std::string failure() const override { return mapper_.failure(); }
  bool working() const override { return completed() < submitted_; }
  bool work() override {
    const bool left = completed() < submitted_;
    mapper_.wait(completed() + (left ? 1 : 0), std::chrono::milliseconds(100));
    return left;
  }

 private:
  uint64_t submitted_ = 0;
  Mapper mapper_;
};

class OwnHands final : public Hands {
 public:
  uint64_t attempt(std::function<void()> operation) override {
    queue_.push_back(std::move(operation));
    return ++submitted_;
  }
  uint64_t completed() const override { return completed_; }
  bool refused(uint64_t ticket) override { return refused_.erase(ticket) > 0; }
  std::string failure() const override { return failure_; }
  bool working() const override { return working_; }
  bool work() override {
    if (queue_.empty() || working_) {
      return false;
    }
    working_ = true;  // the device runs while it works, and the engine with it
    const auto operation = std::move(queue_.front());
    queue_.pop_front();
    try {
      operation();
    } catch (const std::system_error&) {
      refused_.insert(completed_ + 1);
    } catch (const std::exception& error) {
      failure_ = failure_.empty() ? error.what() : failure_;
    }
    ++completed_;
    working_ = false;
    return true;
  }

 private:
  std::deque<std::function<void()>> queue_;
  uint64_t submitted_ = 0;
  uint64_t completed_ = 0;
  std::set<uint64_t> refused_;
  std::string failure_;
  bool working_ = false;
};

}  // namespace quire::metal
