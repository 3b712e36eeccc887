#include "ops/probe.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>

#include "core/checked.h"

namespace quire::ops {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;
constexpr int64_t kMaxBytes = int64_t{1} << 34;
constexpr int64_t kMaxPasses = 1000;

}  // namespace

std::vector<double> read_seconds(int64_t bytes, int64_t passes, CpuWorkers& workers) {
  checked_between("bytes", bytes, kPieceBytes, kMaxBytes);
  checked_between("passes", passes, 1, kMaxPasses);
  const auto pieces = static_cast<size_t>(bytes / kPieceBytes);
  std::vector<uint64_t> data(pieces * kPieceBytes / sizeof(uint64_t));
  std::iota(data.begin(), data.end(), uint64_t{1});
  std::vector<uint64_t> sums(pieces);
  std::vector<double> seconds;
  const auto held = workers.pool.hold();
  for (int64_t pass = 0; pass < passes; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    workers.pool.run(pieces, [&](size_t piece, size_t) {
      const auto* from = reinterpret_cast<const std::byte*>(data.data()) + piece * kPieceBytes;
      sums[piece] = workers.kernels.read_all(from, kPieceBytes);
    });
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  if (std::all_of(sums.begin(), sums.end(), [](uint64_t sum) { return sum == 0; })) {
    throw std::logic_error("the probe read nothing");
  }
  return seconds;
}

}  // namespace quire::ops
