// What ThreadSanitizer is told: which threads of a threadgroup may rely on what others have
// written. Nothing where the build does not look for races.
#pragma once

#include <cstdint>

#ifdef MSL_RACES
#include <sanitizer/tsan_interface.h>
#endif

namespace msl::races {

// A thread gives what it has written, and receives what others have given, by way of an address.
#ifdef MSL_RACES
inline void give(void* by) { __tsan_release(by); }
inline void receive(void* by) { __tsan_acquire(by); }
#else
inline void give(void*) {}
inline void receive(void*) {}
#endif

// Threads give when they come to a barrier and receive when they go on. Who goes on late must not
// receive what others give at the next barrier already: each time goes by the other address.
class Barrier {
 public:
  void come(bool orders_memory, uint64_t time) {
    if (orders_memory) {
      give(&turns_[time % 2]);
    }
  }
  void go_on(bool orders_memory, uint64_t time) {
    if (orders_memory) {
      receive(&turns_[time % 2]);
    }
  }

 private:
  char turns_[2];
};

// The host before a threadgroup, its threads at the start and at the end, the host after it.
struct Host {
  void begin() { give(&before); }
  void enter() { receive(&before); }
  void end() { give(&after); }
  void join() { receive(&after); }

  char before;
  char after;
};

}  // namespace msl::races
