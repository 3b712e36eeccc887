#include "core/mapper.h"

#include <exception>
#include <utility>

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

uint64_t Mapper::submit(std::function<void()> operation) {
  uint64_t ticket;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(operation));
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
    std::function<void()> operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::string failure;
    try {
      operation();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    operation = nullptr;  // lets go of its heap and range before the ticket is seen as done
    lock.lock();
    ++completed_;
    if (failure_.empty()) {
      failure_ = std::move(failure);
    }
    changed_.notify_all();
  }
}

}  // namespace quire
