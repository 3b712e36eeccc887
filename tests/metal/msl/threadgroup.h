// The threads of one threadgroup, run by one thread of the CPU.
#pragma once

#include <memory>
#include <vector>

#include "executor.h"
#include "fiber.h"
#include "races.h"

namespace msl {

// A lane runs until it has to wait for others; then the next lane that can run goes on. Every
// operation that needs all lanes of a simdgroup is a meeting: the lanes come to it one by one, and
// the last to come completes it. Whoever comes to another operation meanwhile, or returns, is a
// mistake in the text, since on the device the lanes would wait forever or get garbage.
class Threadgroup {
 public:
  Threadgroup() = default;
  Threadgroup(const Threadgroup&) = delete;
  Threadgroup& operator=(const Threadgroup&) = delete;

  // The one whose lanes this thread of the CPU runs.
  static Threadgroup& current() { return *current_; }
  // For the launches of this thread.
  static Threadgroup& of_this_thread();

  // `place`: of its first thread. `order`: 0, or a seed.
  void run(const Dispatch& dispatch, const Place& place, uint32_t order);

  const Place& place() const { return lanes_[running_].place; }
  const Dispatch& dispatch() const { return *dispatch_; }
  Word reduce(const Operation& operation, Word word, Reduce function);
  Word take(const Operation& operation, Word word, unsigned mask);
  void simdgroup_barrier(const Operation& operation, bool orders_memory);
  void threadgroup_barrier(const Operation& operation, bool orders_memory);
  void* memory(unsigned key, size_t bytes);

 private:
  struct Lane {
    Place place;
    std::unique_ptr<Fiber> fiber;
  };
  // A lane is at most one meeting ahead of the others, so two sets of words are enough.
  struct Meeting {
    Word words[kSimdWidth];
    Word result;
  };
  struct Simdgroup {
    uint32_t lanes;            // bits: exist
    uint32_t returned;
    uint32_t waiting;          // have come to the meeting
    bool blocked;              // all lanes wait for the threadgroup's other simdgroups
    Operation operation;       // of the meeting
    uint64_t meetings;         // completed
    races::Barrier barrier;
    Meeting meeting[2];
  };
  struct Variable {
    unsigned key;
    std::unique_ptr<char, void (*)(void*)> bytes;
  };

  static void lane_main();
  void prepare(const Place& first, uint32_t order);
  // Comes to a meeting, and returns it once all lanes have. `completes`: this lane was the last.
  Meeting& meet(const Operation& operation, Word word, bool& completes, Reduce function = nullptr);
  void leave(bool ends);
  // A lane of the simdgroup that can run, beginning behind `lane`; kMaxThreads where there is none.
  uint32_t runnable(uint32_t simdgroup, uint32_t lane) const;
  void require_same(const Operation& wanted, const Operation& other, const char* of) const;

  // Asked for at every operation: a plain address in the thread's own block.
  [[gnu::tls_model("initial-exec")]] static thread_local Threadgroup* current_;

  const Dispatch* dispatch_ = nullptr;
  Fiber outside_;
  std::vector<Lane> lanes_;
  std::vector<Simdgroup> simdgroups_;
  std::vector<uint32_t> order_;  // of the simdgroups
  std::vector<Variable> memory_;
  size_t memory_bytes_ = 0;
  uint32_t threads_ = 0;
  uint32_t running_ = 0;
  uint32_t blocked_ = 0;   // simdgroups that wait for the others
  uint32_t returned_ = 0;  // simdgroups
  Operation waits_at_{};   // the operation that the blocked ones wait at
  uint64_t barriers_ = 0;  // completed
  races::Barrier barrier_;
  races::Host host_;
};

}  // namespace msl
