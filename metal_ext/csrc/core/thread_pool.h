#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

// Threads for the CPU kernels. MLX runs a CPU stream on one thread, so a primitive that wants more
// brings its own. The caller works too: threads() == 1 means that there are no others.
class ThreadPool {
 public:
  // Throws std::system_error when the system refuses a thread.
  explicit ThreadPool(int64_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t threads() const { return helpers_.size() + 1; }

  using Task = std::function<void(size_t index, size_t worker)>;

  // Runs task(index, worker) for every index below count, each once, and returns when all are
  // done. worker < threads() tells apart the tasks that run at the same time. Tasks must not throw.
  // The caller holds the pool. shared: whether they are worth a helper; if not, the caller runs
  // them all, which it may do inside of a task too.
  void run(size_t count, const Task& task, bool shared = true);

  // The same for body(index, worker), `at_once` indices in a row as one task.
  template <class Body>
  void run_in_groups(size_t count, size_t at_once, const Body& body, bool shared = true) {
    const auto task = [&](size_t group, size_t worker) {
      const size_t end = std::min(count, (group + 1) * at_once);
      for (size_t i = group * at_once; i < end; ++i) {
        body(i, worker);
      }
    };
    run((count + at_once - 1) / at_once, task, shared);
  }

  // Held by an operation from its first use of scratch() to its last run(): one at a time.
  std::unique_lock<std::mutex> hold() { return std::unique_lock(owner_); }

  // Room for the intermediate results of the operation that holds the pool: at least that many
  // floats, on a cache line; valid until the next call. Grows, never shrinks.
  float* scratch(size_t floats);

 private:
  void stop();
  void help(size_t worker);
  void work(size_t count, const Task& task, size_t worker);

  std::mutex owner_;
  std::vector<float> scratch_;

  std::atomic<uint32_t> round_{0};    // rises with every run(): what resting helpers watch
  std::atomic<size_t> next_{0};       // the next index to take
  std::atomic<size_t> helping_{0};    // helpers that are inside the current round
  std::mutex round_mutex_;            // guards what follows
  std::condition_variable wake_;
  bool open_ = false;                 // whether helpers may still join the round
  bool stopping_ = false;
  const Task* task_ = nullptr;
  size_t count_ = 0;
  std::vector<std::thread> helpers_;
};

}  // namespace quire
