// How fast all threads together read memory. Built by limits.py.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))
#endif

namespace {

constexpr size_t kLineBytes = 64;
// A huge page: within it, streams that lie far apart cost no further translation of addresses.
constexpr size_t kPieceBytes = size_t{2} << 20;
using Line __attribute__((vector_size(kLineBytes))) = uint64_t;

// Streams lie far apart in a piece, so that several rows of memory are open at once, and every
// processor's own prefetcher may follow some. What is best on one processor is slow on another.

template <size_t Streams, size_t Ahead>
[[gnu::always_inline]] inline uint64_t read_piece(const std::byte* piece) {
  constexpr size_t kPart = kPieceBytes / Streams;
  constexpr size_t kLines = Streams < 4 ? 4 / Streams : 1;
  Line sums[Streams][kLines] = {};
  for (size_t i = 0; i < kPart; i += kLines * kLineBytes) {
    for (size_t s = 0; s < Streams; ++s) {
      for (size_t line = 0; line < kLines; ++line) {
        const std::byte* from = piece + s * kPart + i + line * kLineBytes;
        if constexpr (Ahead != 0) {
          __builtin_prefetch(from + Ahead, 0, 3);
        }
        sums[s][line] ^= *reinterpret_cast<const Line*>(from);
      }
    }
  }
  uint64_t sum = 0;
  for (const auto& stream : sums) {
    for (const auto& line : stream) {
      for (size_t i = 0; i < kLineBytes / sizeof(uint64_t); ++i) {
        sum ^= line[i];
      }
    }
  }
  return sum;
}

using Reader = uint64_t (*)(const std::byte*);

template <size_t Streams, size_t Ahead>
struct Way {
#if defined(__x86_64__)
  AVX512 static uint64_t avx512(const std::byte* p) { return read_piece<Streams, Ahead>(p); }
  AVX2 static uint64_t avx2(const std::byte* p) { return read_piece<Streams, Ahead>(p); }
#endif
  static uint64_t plain(const std::byte* p) { return read_piece<Streams, Ahead>(p); }

  static Reader best() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return avx512;
    if (__builtin_cpu_supports("avx2")) return avx2;
#endif
    return plain;
  }
};

constexpr Reader (*kWays[])() = {
    Way<1, 0>::best, Way<1, 2048>::best, Way<2, 0>::best, Way<2, 2048>::best,
    Way<4, 0>::best, Way<4, 2048>::best, Way<8, 0>::best, Way<8, 2048>::best,
    Way<16, 0>::best, Way<16, 1024>::best,
};

using Clock = std::chrono::steady_clock;

// Runs `work(thread)` on all threads at once; returns the seconds from the first one's begin to the
// last one's end.
double seconds_of_all(size_t threads, const std::function<void(size_t)>& work) {
  std::barrier<> all_here(static_cast<std::ptrdiff_t>(threads));
  std::vector<Clock::time_point> begins(threads), ends(threads);
  const auto one = [&](size_t thread) {
    all_here.arrive_and_wait();
    begins[thread] = Clock::now();
    work(thread);
    ends[thread] = Clock::now();
  };
  std::vector<std::thread> others;
  for (size_t thread = 1; thread < threads; ++thread) {
    others.emplace_back(one, thread);
  }
  one(0);
  for (auto& other : others) {
    other.join();
  }
  const auto begin = *std::min_element(begins.begin(), begins.end());
  const auto end = *std::max_element(ends.begin(), ends.end());
  return std::chrono::duration<double>(end - begin).count();
}

struct Memory {
  std::byte* whole;
  size_t whole_bytes;
  std::byte* pieces;
  size_t count;
};

}  // namespace

// --- what limits.py calls ------------------------------------------------------------------------

extern "C" {

size_t read_ways() { return std::size(kWays); }

// Memory in huge pages where the system has them: with small ones, and more so in a virtual
// machine, a pass would measure how fast addresses are translated.
// bytes: rounded down to whole pieces.
// Returns null when the system has no memory.
Memory* read_probe_new(size_t bytes) {
  const size_t count = std::max<size_t>(1, bytes / kPieceBytes);
  const size_t whole_bytes = (count + 1) * kPieceBytes;
  void* whole = mmap(nullptr, whole_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (whole == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(whole);
  auto* pieces = static_cast<std::byte*>(whole) + (kPieceBytes - address % kPieceBytes);
#if defined(MADV_HUGEPAGE)
  madvise(pieces, count * kPieceBytes, MADV_HUGEPAGE);
#endif
  auto* words = reinterpret_cast<uint64_t*>(pieces);
  for (size_t i = 0; i < count * kPieceBytes / sizeof(uint64_t); ++i) {
    words[i] = i * 0x9E3779B97F4A7C15u;
  }
  return new Memory{static_cast<std::byte*>(whole), whole_bytes, pieces, count};
}

size_t read_probe_bytes(const Memory* memory) { return memory->count * kPieceBytes; }

// One pass by all threads, in one way; they take pieces until none is left. sum: all words, xored.
double read_probe_pass(const Memory* memory, size_t way, size_t threads, uint64_t* sum) {
  const Reader reader = kWays[way]();
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> all{0};
  const double seconds = seconds_of_all(threads, [&](size_t) {
    uint64_t own = 0;
    for (size_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < memory->count;) {
      own ^= reader(memory->pieces + piece * kPieceBytes);
    }
    all ^= own;
  });
  *sum = all;
  return seconds;
}

void read_probe_free(Memory* memory) {
  munmap(memory->whole, memory->whole_bytes);
  delete memory;
}

}  // extern "C"
