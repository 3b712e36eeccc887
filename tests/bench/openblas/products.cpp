// MLX's Linux wheel brings a reference BLAS of one thread. Loaded before MLX (LD_PRELOAD), this
// library answers for it: the dynamic linker takes the first cblas_sgemm that it finds.
//
// OpenBLAS multiplies on one thread here. Its own threads wait for each other by giving up their
// time slices, so that on a machine where anything else runs, a product of 50 us can take 8 ms. A
// product is cut into pieces instead, which OpenMP's threads take one by one: a thread that the
// system holds up holds up its piece alone.
//
//   C[m, n] = alpha A[m, k] B[k, n] + beta C:   A  x  | B0 | B1 | B2 |  ->  | C0 | C1 | C2 |
//
// Narrow pieces also have OpenBLAS read B as it lies: for a few rows, copying B into its own order
// first takes longer than the product.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "cblas.h"

namespace {

// So many multiplications repay a thread's attention.
constexpr double kPieceWork = 512.0 * 1024;
// Where the uncut factor has no more lines than this, small pieces are multiplied as they lie;
constexpr int64_t kDirectLines = 12;
// where it has more, it is copied for every piece, which pieces of so many lines repay.
constexpr int64_t kCopyingLines = 256;
// Pieces are whole groups of lines, as OpenBLAS's kernels like them.
constexpr int64_t kGroupLines = 16;

std::atomic<uint64_t> calls;

int64_t in_groups(double lines) {
  const auto whole = static_cast<int64_t>(std::ceil(lines));
  return (whole + kGroupLines - 1) / kGroupLines * kGroupLines;
}

// Lines of a piece; the last one may have fewer.
int64_t piece_lines(int64_t length, int64_t uncut, int64_t k) {
  const double line_work = static_cast<double>(uncut) * static_cast<double>(std::max<int64_t>(k, 1));
  const double repaid = kPieceWork / line_work;
  int64_t lines = in_groups(std::min(repaid, static_cast<double>(length)));
  if (uncut > kDirectLines) {
    lines = std::max(lines, kCopyingLines);
  }
  const int64_t pieces = (length + lines - 1) / lines;
  return in_groups(static_cast<double>(length) / static_cast<double>(pieces));  // of like size
}

struct OneThread {
  OneThread() { scipy_openblas_set_num_threads(1); }
} one_thread;

}  // namespace

extern "C" void cblas_sgemm(
    enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE trans_a, enum CBLAS_TRANSPOSE trans_b, blasint m,
    blasint n, blasint k, float alpha, const float* a, blasint lda, const float* b, blasint ldb,
    float beta, float* c, blasint ldc) {
  calls.fetch_add(1, std::memory_order_relaxed);
  if (order != CblasRowMajor || m <= 0 || n <= 0) {
    scipy_cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  const bool by_rows = m > n;  // whether A and C are cut, not B and C
  const int64_t length = by_rows ? m : n;
  const int64_t lines = piece_lines(length, by_rows ? n : m, k);
  const int64_t a_step = trans_a == CblasNoTrans ? lda : 1;
  const int64_t b_step = trans_b == CblasNoTrans ? 1 : ldb;
#pragma omp parallel for schedule(dynamic, 1) if (lines < length)
  for (int64_t first = 0; first < length; first += lines) {
    const auto count = static_cast<blasint>(std::min(lines, length - first));
    const int64_t row = by_rows ? first : 0;
    const int64_t column = by_rows ? 0 : first;
    scipy_cblas_sgemm(CblasRowMajor, trans_a, trans_b, by_rows ? count : m, by_rows ? n : count, k,
                      alpha, a + row * a_step, lda, b + column * b_step, ldb, beta,
                      c + row * ldc + column, ldc);
  }
}

// How many products there have been: proof that MLX really uses this library.
extern "C" uint64_t bench_blas_calls() { return calls.load(std::memory_order_relaxed); }
