// Threads of the device as fibers of one thread of the CPU.
#pragma once

#include <cstddef>

namespace msl {

// One stack and where it was left. The sanitizers are told of every switch.
class Fiber {
 public:
  // For the stack that the thread runs on.
  Fiber();
  // For a stack of its own, with a guard below it. `index` spreads the fibers over the cache's
  // sets: stacks that begin at equal offsets of their pages would push each other out.
  explicit Fiber(size_t index);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next switch to this fiber calls `entry`, which must not return.
  void start(void (*entry)());
  // Leaves `from`, which is the one that runs. `ends`: for good.
  static void change(Fiber& from, Fiber& to, bool ends);
  // What `entry` calls first.
  void arrived();

 private:
  void* stack_pointer_ = nullptr;
  char* stack_ = nullptr;  // null for the thread's own
  size_t top_offset_ = 0;
  [[maybe_unused]] void* race_context_ = nullptr;  // ThreadSanitizer's
  [[maybe_unused]] void* fake_stack_ = nullptr;    // AddressSanitizer's
  const void* bottom_ = nullptr;
  size_t size_ = 0;
};

}  // namespace msl
