#include "ops/probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>

#include "core/checked.h"

namespace quire::ops {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;
constexpr int64_t kMaxBytes = int64_t{1} << 34;
constexpr int64_t kMaxPasses = 1000;
constexpr size_t kHugePageBytes = size_t{2} << 20;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory in huge pages where the system has them: with small ones, and more so in a virtual
// machine, a pass would measure how fast addresses are translated.
std::unique_ptr<uint64_t[], Free> allocate(size_t bytes) {
  const size_t rounded = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void* const memory = std::aligned_alloc(kHugePageBytes, rounded);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
#ifdef MADV_HUGEPAGE
  madvise(memory, rounded, MADV_HUGEPAGE);  // a wish: without it the probe is only slower
#endif
  return std::unique_ptr<uint64_t[], Free>(static_cast<uint64_t*>(memory));
}

}  // namespace

std::vector<double> read_seconds(int64_t bytes, int64_t passes, CpuWorkers& workers) {
  checked_between("bytes", bytes, kPieceBytes, kMaxBytes);
  checked_between("passes", passes, 1, kMaxPasses);
  const auto pieces = static_cast<size_t>(bytes / kPieceBytes);
  const auto data = allocate(pieces * kPieceBytes);
  std::iota(data.get(), data.get() + pieces * kPieceBytes / sizeof(uint64_t), uint64_t{1});
  std::vector<uint64_t> sums(pieces);
  std::vector<double> seconds;
  const auto held = workers.pool.hold();
  for (int64_t pass = 0; pass < passes; ++pass) {
    double fastest = std::numeric_limits<double>::infinity();
    for (size_t way = 0; way < cpu::kReadWays; ++way) {
      const auto start = std::chrono::steady_clock::now();
      workers.pool.run(pieces, [&](size_t piece, size_t) {
        const auto* from = reinterpret_cast<const std::byte*>(data.get()) + piece * kPieceBytes;
        sums[piece] = workers.kernels.read_all(way, from, kPieceBytes);
      });
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      fastest = std::min(fastest, took.count());
    }
    seconds.push_back(fastest);
  }
  if (std::all_of(sums.begin(), sums.end(), [](uint64_t sum) { return sum == 0; })) {
    throw std::logic_error("the probe read nothing");
  }
  return seconds;
}

}  // namespace quire::ops
