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

// A pool of threads for the CPU's kernels, because MLX runs a CPU stream on one thread only. The
// calling thread works as well. With threads() == 1 there are no helper threads.
class ThreadPool {
 public:
  explicit ThreadPool(int64_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t threads() const { return helpers_.size() + 1; }

  using Task = std::function<void(size_t index, size_t worker)>;

  // Runs task(index, worker) once for each index below count. Tasks that run at the same time have
  // different `worker` numbers. Tasks must not throw. The caller must hold the lock that hold()
  // returns. If `shared` is false, only the calling thread works, and a task may call run().
  void run(size_t count, const Task& task, bool shared = true);

  // Runs body(index, worker) for each index below count, `at_once` indices in one task.
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

  // Locks the pool for one operation, from its first scratch() to its last run().
  std::unique_lock<std::mutex> hold() { return std::unique_lock(owner_); }

  // Returns memory for `floats` floats, aligned to a cache line and valid until the next call.
  float* scratch(size_t floats);

 private:
  void stop();
  void help(size_t worker);
  void work(size_t count, const Task& task, size_t worker);

  std::mutex owner_;
  std::vector<float> scratch_;

  std::atomic<uint32_t> round_{0};    // the number of run() calls, which idle helpers watch
  std::atomic<size_t> next_{0};       // the next index of a task to run
  std::atomic<size_t> helping_{0};    // helpers that work for the current run()
  std::mutex round_mutex_;            // guards the members below
  std::condition_variable wake_;
  bool open_ = false;                 // whether helpers may still join the current run()
  bool stopping_ = false;
  const Task* task_ = nullptr;
  size_t count_ = 0;
  std::vector<std::thread> helpers_;
};

}  // namespace quire
