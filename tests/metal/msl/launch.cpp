#include "launch.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "bind.h"
#include "threadgroup.h"

namespace msl {
namespace {

std::atomic<unsigned> order_seed{0};

std::vector<msl_kernel>& kernels() {
  static std::vector<msl_kernel> all;
  return all;
}

uint32_t groups_of(uint32_t threads, uint32_t group) { return (threads + group - 1) / group; }

// The threadgroup's size, or what is left of the grid at its far edge.
uint32_t edge(bool cut, uint32_t threads, uint32_t group, uint32_t index) {
  return cut ? std::min(group, threads - index * group) : group;
}

// The grid's threadgroups, in order, or shuffled.
std::vector<Size> threadgroups_of(Size grid, unsigned seed) {
  std::vector<Size> all;
  for (uint32_t z = 0; z < grid.z; ++z) {
    for (uint32_t y = 0; y < grid.y; ++y) {
      for (uint32_t x = 0; x < grid.x; ++x) {
        all.push_back({x, y, z});
      }
    }
  }
  if (seed != 0) {
    std::shuffle(all.begin(), all.end(), std::minstd_rand(seed));
  }
  return all;
}

[[noreturn]] void refuse(const char* kernel, const char* what) {
  std::fprintf(stderr, "MSL: %s: %s\n", kernel, what);
  std::abort();
}

}  // namespace

void run(const Dispatch& dispatch) {
  const Size group = dispatch.threadgroup;
  const uint64_t threads = uint64_t{group.x} * group.y * group.z;
  if (threads == 0 || threads > kMaxThreads || threads > dispatch.max_threads) {
    refuse(dispatch.kernel, "a threadgroup of a size that the kernel cannot have");
  }
  const Size given = dispatch.grid;
  const bool cut = dispatch.counts_threads;
  Place place{};
  place.full_threadgroup_size = group;
  place.threadgroups = given;
  place.threads = {given.x * group.x, given.y * group.y, given.z * group.z};
  if (cut) {
    place.threads = given;
    place.threadgroups = {groups_of(given.x, group.x), groups_of(given.y, group.y),
                          groups_of(given.z, group.z)};
  }
  const unsigned seed = order_seed;
  for (const Size& at : threadgroups_of(place.threadgroups, seed)) {
    place.threadgroup = at;
    place.threadgroup_size = {edge(cut, given.x, group.x, at.x), edge(cut, given.y, group.y, at.y),
                              edge(cut, given.z, group.z, at.z)};
    Threadgroup::of_this_thread().run(dispatch, place, seed);
  }
}

const Place& place() { return Threadgroup::current().place(); }

Word reduce(Operation operation, Word word, Reduce function) {
  return Threadgroup::current().reduce(operation, word, function);
}

Word take(Operation operation, Word word, unsigned mask) {
  return Threadgroup::current().take(operation, word, mask);
}

void simdgroup_barrier(Operation operation, bool orders_memory) {
  Threadgroup::current().simdgroup_barrier(operation, orders_memory);
}

void threadgroup_barrier(Operation operation, bool orders_memory) {
  Threadgroup::current().threadgroup_barrier(operation, orders_memory);
}

void* threadgroup_memory(unsigned key, size_t bytes) {
  return Threadgroup::current().memory(key, bytes);
}

void fail(const char* format, ...) {
  const Threadgroup& group = Threadgroup::current();
  const Place& at = group.place();
  std::fprintf(
      stderr, "MSL: %s, threadgroup (%u, %u, %u), thread %u: ", group.dispatch().kernel,
      at.threadgroup.x, at.threadgroup.y, at.threadgroup.z, at.index);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

Registration::Registration(const msl_kernel& kernel) { kernels().push_back(kernel); }

}  // namespace msl

const msl_kernel* find_launcher(const char* host_name) {
  for (const msl_kernel& kernel : msl::kernels()) {
    if (std::strcmp(kernel.host_name, host_name) == 0) {
      return &kernel;
    }
  }
  return nullptr;
}

void msl_set_order(unsigned seed) { msl::order_seed = seed; }
