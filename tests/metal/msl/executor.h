// What kernel text needs of whoever runs it: its place in the grid, its simdgroup, barriers and
// threadgroup memory. include/ speaks MSL on top of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace msl {

constexpr unsigned kSimdWidth = 32;
constexpr unsigned kMaxThreads = 1024;                        // of a threadgroup
constexpr size_t kThreadgroupBytes = size_t{32} << 10;        // of its memory

struct Size {
  uint32_t x, y, z;
};

// One thread's place.
struct Place {
  Size threadgroups;            // in the grid
  Size threads;                 // in the grid
  Size threadgroup_size;        // of this threadgroup: smaller at an edge
  Size full_threadgroup_size;   // as dispatched
  Size threadgroup;
  Size in_threadgroup;
  uint32_t index;               // in the threadgroup
  uint32_t simdgroup;
  uint32_t lane;
  uint32_t simdgroups;          // of this threadgroup
};
const Place& place();

// One operation of the text that all lanes of a simdgroup must come to together.
struct Operation {
  const char* name;
  unsigned line;
  unsigned column;
  bool operator==(const Operation& other) const {
    return name == other.name && line == other.line && column == other.column;
  }
};

// Where an operation stands in the text: a default argument, so that it is the caller's place.
struct Site {
  unsigned line;
  unsigned column;
  static constexpr Site here(
      unsigned line = __builtin_LINE(), unsigned column = __builtin_COLUMN()) {
    return {line, column};
  }
};

// A lane's number, as a simdgroup passes it on: its bytes, in the low end.
using Word = uint64_t;
// Of the words of the lanes that are set in `lanes`.
using Reduce = Word (*)(const Word* words, uint32_t lanes);

// Waits for all lanes of the simdgroup, and returns what they gave together, or what lane
// (own lane XOR mask) gave.
Word reduce(Operation operation, Word word, Reduce function);
Word take(Operation operation, Word word, unsigned mask);
// Waits for all threads of the simdgroup, or of the threadgroup. Without `orders_memory` it orders
// nothing for others.
void simdgroup_barrier(Operation operation, bool orders_memory);
void threadgroup_barrier(Operation operation, bool orders_memory);

// A variable of the threadgroup: the same one for all its threads that ask by the same key. Filled
// with NaN.
void* threadgroup_memory(unsigned key, size_t bytes);

// Ends the process with one line about this thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// A dispatch of a kernel's threads, each of which calls body(context).
struct Dispatch {
  const char* kernel;
  unsigned max_threads;  // of a threadgroup
  bool counts_threads;   // the grid: threads, or threadgroups
  Size grid;
  Size threadgroup;
  void (*body)(const void* context);
  const void* context;
};
void run(const Dispatch& dispatch);

}  // namespace msl
