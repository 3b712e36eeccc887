#include "core/mapper.h"

#include <exception>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/checked.h"

// Implements the queue of mapping changes and the thread that makes them.
namespace quire {

Mapper::Mapper() : thread_([this] { run(); }) {}

Mapper::~Mapper() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool Mapper::refused(uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  require<std::logic_error>(ticket <= completed_, "ticket ", ticket, " is not completed");
  return refused_.erase(ticket) > 0;
}

uint64_t Mapper::enqueue(std::function<void()> run, bool may_be_refused) {
  uint64_t ticket;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(run), may_be_refused});
    ticket = ++submitted_;
  }
  changed_.notify_all();
  return ticket;
}

uint64_t Mapper::completed() const {
  const std::lock_guard lock(mutex_);
  return completed_;
}

bool Mapper::wait(uint64_t ticket, std::chrono::nanoseconds timeout) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return completed_ >= ticket; });
}

std::string Mapper::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Mapper::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::string failure;
    bool refused = false;
    try {
      operation.run();
    } catch (const std::system_error& error) {
      refused = operation.may_be_refused;
      failure = refused ? "" : error.what();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    operation.run = nullptr;  // releases heap and range before the operation counts as complete
    lock.lock();
    ++completed_;
    if (refused) {
      refused_.insert(completed_);
    }
    if (failure_.empty()) {
      failure_ = std::move(failure);
    }
    changed_.notify_all();
  }
}

}  // namespace quire
