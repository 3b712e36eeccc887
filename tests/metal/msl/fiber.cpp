#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if __has_feature(address_sanitizer)
#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef MSL_RACES  // this file is compiled without the instrumentation that it speaks to
#include <sanitizer/tsan_interface.h>
#endif

// Keeps what a called function must keep on the stack that is left, and takes it from the other.
extern "C" void msl_switch_stack(void** leave, void* enter);

#if defined(__x86_64__)
asm(R"(
.globl msl_switch_stack
.type msl_switch_stack, @function
msl_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch_stack, .-msl_switch_stack
)");
constexpr size_t kEntryWord = 6;   // what `ret` takes
constexpr size_t kFrameWords = 8;  // one word above it, as if `entry` had been called
#elif defined(__aarch64__)
asm(R"(
.globl msl_switch_stack
.type msl_switch_stack, %function
msl_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size msl_switch_stack, .-msl_switch_stack
)");
constexpr size_t kEntryWord = 11;  // x30
constexpr size_t kFrameWords = 20;
#else
#error "fibers are written for x86-64 and arm64"
#endif

namespace msl {
namespace {

constexpr size_t kStackBytes = size_t{128} << 10;
constexpr size_t kGuardBytes = size_t{64} << 10;  // a page, whatever the system's is
constexpr size_t kSpread = 32;                    // fibers of a simdgroup, which run in turn
constexpr size_t kSpreadBytes = 576;

}  // namespace

Fiber::Fiber() {
#if __has_feature(address_sanitizer)
  pthread_attr_t attributes;
  void* bottom = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &size_);
  pthread_attr_destroy(&attributes);
  bottom_ = bottom;
#endif
}

Fiber::Fiber(size_t index) : top_offset_(index % kSpread * kSpreadBytes) {
  void* const memory = mmap(
      nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    std::perror("the stack of a fiber");
    std::abort();
  }
  stack_ = static_cast<char*>(memory) + kGuardBytes;
  bottom_ = stack_;
  size_ = kStackBytes;
}

Fiber::~Fiber() {
#ifdef MSL_RACES
  if (stack_ != nullptr && race_context_ != nullptr) {
    __tsan_destroy_fiber(race_context_);
  }
#endif
  if (stack_ != nullptr) {
    munmap(stack_ - kGuardBytes, kGuardBytes + kStackBytes);
  }
}

void Fiber::start(void (*entry)()) {
  auto* const top = reinterpret_cast<uintptr_t*>(stack_ + kStackBytes - top_offset_);
  uintptr_t* const frame = top - kFrameWords;
  for (uintptr_t* word = frame; word < top; ++word) {
    *word = 0;
  }
  frame[kEntryWord] = reinterpret_cast<uintptr_t>(entry);
  stack_pointer_ = frame;
#ifdef MSL_RACES
  if (race_context_ != nullptr) {
    __tsan_destroy_fiber(race_context_);
  }
  race_context_ = __tsan_create_fiber(0);
#endif
}

void Fiber::change(Fiber& from, Fiber& to, [[maybe_unused]] bool ends) {
#if __has_feature(address_sanitizer)
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack_, to.bottom_, to.size_);
#endif
#ifdef MSL_RACES
  if (from.stack_ == nullptr) {
    from.race_context_ = __tsan_get_current_fiber();
  }
  // Running one after the other puts nothing in order: only barriers do.
  __tsan_switch_to_fiber(to.race_context_, __tsan_switch_to_fiber_no_sync);
#endif
  msl_switch_stack(&from.stack_pointer_, to.stack_pointer_);
  from.arrived();
}

void Fiber::arrived() {
#if __has_feature(address_sanitizer)
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

}  // namespace msl
