// Kernels of kernels/metal, compiled for the CPU: found by host name, launched over a grid.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// buffers: one address per [[buffer(n)]], none of them null. grid, threads: three sizes each. What
// the kernel does wrong, where Metal would not define the outcome, ends the process: a line on
// stderr names the kernel, the thread and the mistake.
typedef void (*msl_launch)(void** buffers, const unsigned* grid, const unsigned* threads);

struct msl_kernel {
  const char* host_name;
  msl_launch over_threadgroups;  // dispatchThreadgroups: grid counts threadgroups
  msl_launch over_threads;       // dispatchThreads: grid counts threads; threadgroups at its
                                 // far edges are smaller
  unsigned max_threads;          // of a threadgroup: what its pipeline state would say
};

// Null where no such kernel is linked. Any thread; kernels of different threads run at once.
const struct msl_kernel* find_launcher(const char* host_name);

// 0: threadgroups, and the simdgroups of each, run in ascending order. Any other number: in an
// order of its own. What a kernel writes must not depend on it. For all launches that follow.
void msl_set_order(unsigned seed);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
