// How fast all threads together multiply and add, where memory is not asked. Built by limits.py.

#include <array>
#include <atomic>
#include <cstdint>

#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bf16")))
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define AMX __attribute__((target("amx-tile,amx-bf16")))
#endif

namespace {

template <class Number, size_t Bytes>
using Vector __attribute__((vector_size(Bytes))) = Number;

// Sums stay in registers: what no product of matrices can pass.

constexpr double kSecondsPerLook = 0.002;

template <size_t Bytes, size_t Sums>
[[gnu::always_inline]] inline float multiply_add(int64_t rounds) {
  Vector<float, Bytes> sums[Sums] = {};
  Vector<float, Bytes> factor = {}, addend = {};
  factor += 0.5f;
  addend += 1.0f;
  for (size_t i = 0; i < Sums; ++i) {
    sums[i] += static_cast<float>(i);  // what is the same twice is computed once
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (size_t i = 0; i < Sums; ++i) {
      sums[i] = sums[i] * factor + addend;
    }
  }
  float total = 0;
  for (const auto& sum : sums) {
    total += sum[0];
  }
  return total;
}

struct Arithmetic {
  float (*run)(int64_t rounds);
  double flop_per_round;
};

#if defined(__x86_64__)
AVX512 float multiply_add_avx512(int64_t rounds) { return multiply_add<64, 20>(rounds); }
AVX2 float multiply_add_avx2(int64_t rounds) { return multiply_add<32, 12>(rounds); }

AVX512_BF16 float dot_bf16(int64_t rounds) {
  constexpr size_t kSums = 20;
  __m512 sums[kSums];
  for (size_t i = 0; i < kSums; ++i) {
    sums[i] = _mm512_set1_ps(static_cast<float>(i));
  }
  const __m512bh ones = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0f), _mm512_set1_ps(1.0f));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums; ++i) {
      sums[i] = _mm512_dpbf16_ps(sums[i], ones, ones);
    }
  }
  float total = 0;
  for (const auto& sum : sums) {
    total += sum[0];
  }
  return total;
}
#endif
#if defined(AMX)
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

AMX float tiles_bf16(int64_t rounds) {
  alignas(64) std::array<float, 256> result{};
  const TileShapes shapes;
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, result.data(), 64);
  _tile_loadd(5, result.data(), 64);
  _tile_loadd(6, result.data(), 64);
  _tile_loadd(7, result.data(), 64);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, result.data(), 64);
  _tile_release();
  return result[0];
}

// The system gives a process tiles only when it asks for them.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned eax, ebx, ecx, edx;
  asm volatile("cpuid" : "=a"(eax), "=b"(ebx), "=c"(ecx), "=d"(edx) : "a"(7), "c"(0));
  const bool has_tiles = (edx >> 22 & 1) != 0 && (edx >> 24 & 1) != 0;
  return has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
float multiply_add_plain(int64_t rounds) { return multiply_add<16, 12>(rounds); }

Arithmetic float32_arithmetic() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {multiply_add_avx512, 2.0 * 16 * 20};
  if (__builtin_cpu_supports("avx2")) return {multiply_add_avx2, 2.0 * 8 * 12};
#endif
  return {multiply_add_plain, 2.0 * 4 * 12};
}

Arithmetic bfloat16_arithmetic() {
#if defined(AMX)
  if (may_use_tiles()) return {tiles_bf16, 2.0 * 16 * 16 * 32 * 4};
#endif
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) return {dot_bf16, 2.0 * 32 * 20};
#endif
  return {nullptr, 0};
}

double flop_per_s(Arithmetic arithmetic, size_t threads, double seconds) {
  if (arithmetic.run == nullptr) return 0;
  std::atomic<float> seen{0};  // what nobody asks for would not be computed
  int64_t rounds = 1000;
  double best = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    const double took =
        seconds_of_all(threads, [&](size_t) { seen = arithmetic.run(rounds); });
    best = std::max(best, static_cast<double>(rounds * static_cast<int64_t>(threads)) *
                              arithmetic.flop_per_round / took);
    if (took < kSecondsPerLook) rounds *= 2;
  } while (Clock::now() < end);
  return best;
}

}  // namespace

extern "C" {

// The best rate within `seconds`.
double float32_flop_per_s(size_t threads, double seconds) {
  return flop_per_s(float32_arithmetic(), threads, seconds);
}

// The same of products of bfloat16 with sums of float32; 0 where the processor has none.
double bfloat16_flop_per_s(size_t threads, double seconds) {
  return flop_per_s(bfloat16_arithmetic(), threads, seconds);
}

}  // extern "C"
