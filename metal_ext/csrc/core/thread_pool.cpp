#include "core/thread_pool.h"

#include <chrono>
#include <system_error>

#include "core/checked.h"

// Implements the thread pool. Idle helper threads check for work for a short time, and then sleep.
namespace quire {
namespace {

constexpr int64_t kMaxThreads = 256;
constexpr size_t kLineFloats = 64 / sizeof(float);
// The time for which an idle helper thread checks for work before it sleeps. Layers follow each
// other within tens of microseconds. With less time, each layer would have to wake the helpers.
// With more, they would take a core from the server's process.
constexpr auto kWatchTime = std::chrono::microseconds(20);
constexpr int kLooksPerClockRead = 64;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void watch(const std::atomic<uint32_t>& round, uint32_t seen) {
  const auto until = std::chrono::steady_clock::now() + kWatchTime;
  do {
    for (int i = 0; i < kLooksPerClockRead; ++i) {
      if (round.load(std::memory_order_acquire) != seen) {
        return;
      }
      relax();
    }
  } while (std::chrono::steady_clock::now() < until);
}

}  // namespace

ThreadPool::ThreadPool(int64_t threads) {
  const uint64_t total = checked_between("threads", threads, 1, kMaxThreads);
  helpers_.reserve(total - 1);
  try {
    for (uint64_t i = 1; i < total; ++i) {
      helpers_.emplace_back([this, i] { help(i); });
    }
  } catch (const std::system_error& refused) {
    stop();
    throw std::system_error(refused.code(), message("starting ", total, " threads"));
  }
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::stop() {
  {
    const std::lock_guard lock(round_mutex_);
    stopping_ = true;
    round_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) {
    helper.join();
  }
}

void ThreadPool::run(size_t count, const Task& task, bool shared) {
  if (!shared || helpers_.empty() || count < 2) {
    for (size_t i = 0; i < count; ++i) {
      task(i, 0);
    }
    return;
  }
  {
    const std::lock_guard lock(round_mutex_);
    task_ = &task;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    open_ = true;
    round_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  work(count, task, 0);
  {
    const std::lock_guard lock(round_mutex_);
    open_ = false;
  }
  while (helping_.load(std::memory_order_acquire) != 0) {
    relax();
  }
}

void ThreadPool::work(size_t count, const Task& task, size_t worker) {
  for (size_t i = next_.fetch_add(1); i < count; i = next_.fetch_add(1)) {
    task(i, worker);
  }
}

void ThreadPool::help(size_t worker) {
  uint32_t seen = 0;
  while (true) {
    watch(round_, seen);
    std::unique_lock lock(round_mutex_);
    wake_.wait(lock, [&] { return round_.load(std::memory_order_relaxed) != seen; });
    seen = round_.load(std::memory_order_relaxed);
    if (stopping_) {
      return;
    }
    if (!open_) {
      continue;
    }
    const Task& task = *task_;
    const size_t count = count_;
    helping_.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    work(count, task, worker);
    helping_.fetch_sub(1, std::memory_order_release);
  }
}

float* ThreadPool::scratch(size_t floats) {
  if (scratch_.size() < floats + kLineFloats) {
    scratch_.resize(floats + kLineFloats);
  }
  const size_t skip = reinterpret_cast<uintptr_t>(scratch_.data()) / sizeof(float) % kLineFloats;
  return scratch_.data() + (kLineFloats - skip) % kLineFloats;
}

}  // namespace quire
