/* MLX's Linux wheel brings a reference BLAS of one thread. Loaded into the global symbol scope
 * before MLX, this library answers for it: the dynamic linker takes the first cblas_sgemm it finds.
 *
 * OpenBLAS multiplies on one thread here. Its own threads wait for each other by giving up their
 * time slices, so that on a machine where anything else runs, a product of 50 us can take 8 ms. A
 * product is cut into pieces instead, which the threads of the attention kernels take one by one: a
 * thread that the system holds up holds up its piece alone.
 *
 *   C[m, n] = alpha A[m, k] B[k, n] + beta C:   A  x  | B0 | B1 | B2 |  ->  | C0 | C1 | C2 |
 *
 * The cut depends on the product's shape alone, so that the same product has the same bits on any
 * number of threads. Narrow pieces also have OpenBLAS read B as it lies: for a few rows, copying B
 * into its own order first takes longer than the product.
 */
#include "products.h"

#include <stdatomic.h>

#include "cblas.h"

/* So many multiplications repay a thread's attention. */
static const double kPieceWork = 512.0 * 1024;
/* Where the uncut factor has no more lines than this, small pieces are multiplied as they lie; */
static const int64_t kDirectLines = 12;
/* where it has more, it is copied for every piece, which pieces of so many lines repay. */
static const int64_t kCopyingLines = 256;
/* Pieces are whole groups of lines, as OpenBLAS's kernels like them. */
static const int64_t kGroupLines = 16;

static atomic_uint_fast64_t calls;
static _Atomic(quire_runner) current_runner;
static _Atomic(void*) current_workers;

struct product {
  enum CBLAS_TRANSPOSE trans_a, trans_b;
  int64_t m, n, k;
  float alpha, beta;
  const float *a, *b;
  float* c;
  int64_t lda, ldb, ldc;
  int by_rows;   /* whether A and C are cut, not B and C */
  int64_t lines; /* rows or columns of a piece; the last one may have fewer */
};

static int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

static void multiply(const void* pointer, size_t index) {
  const struct product* p = pointer;
  const int64_t first = (int64_t)index * p->lines;
  const int64_t row = p->by_rows ? first : 0;
  const int64_t column = p->by_rows ? 0 : first;
  const int64_t m = p->by_rows ? smaller(p->lines, p->m - row) : p->m;
  const int64_t n = p->by_rows ? p->n : smaller(p->lines, p->n - column);
  scipy_cblas_sgemm(
      CblasRowMajor, p->trans_a, p->trans_b, (blasint)m, (blasint)n, (blasint)p->k, p->alpha,
      p->a + row * (p->trans_a == CblasNoTrans ? p->lda : 1), (blasint)p->lda,
      p->b + column * (p->trans_b == CblasNoTrans ? 1 : p->ldb), (blasint)p->ldb, p->beta,
      p->c + row * p->ldc + column, (blasint)p->ldc);
}

static int64_t in_groups(double lines) {
  const int64_t whole = (int64_t)lines + (lines > (double)(int64_t)lines);
  return (whole + kGroupLines - 1) / kGroupLines * kGroupLines;
}

/* Chooses p->by_rows and p->lines; returns how many pieces that makes. */
static size_t cut(struct product* p) {
  p->by_rows = p->m > p->n;
  const int64_t length = p->by_rows ? p->m : p->n;
  const int64_t uncut = p->by_rows ? p->n : p->m;
  const double repaid = kPieceWork / ((double)uncut * (p->k > 0 ? p->k : 1));
  int64_t lines = in_groups(repaid < length ? repaid : length);
  if (uncut > kDirectLines && lines < kCopyingLines) {
    lines = kCopyingLines;
  }
  const int64_t pieces = (length + lines - 1) / lines;
  p->lines = in_groups((double)length / pieces); /* pieces of like size */
  return (size_t)((length + p->lines - 1) / p->lines);
}

void cblas_sgemm(
    enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE trans_a, enum CBLAS_TRANSPOSE trans_b, blasint m,
    blasint n, blasint k, float alpha, const float* a, blasint lda, const float* b, blasint ldb,
    float beta, float* c, blasint ldc) {
  atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
  if (order != CblasRowMajor || m <= 0 || n <= 0) {
    scipy_cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  struct product product = {
      .trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n, .k = k, .alpha = alpha,
      .beta = beta, .a = a, .b = b, .c = c, .lda = lda, .ldb = ldb, .ldc = ldc};
  const size_t pieces = cut(&product);
  void* const workers = atomic_load_explicit(&current_workers, memory_order_acquire);
  if (workers == NULL || pieces < 2) {
    for (size_t i = 0; i < pieces; ++i) {
      multiply(&product, i);
    }
    return;
  }
  atomic_load_explicit(&current_runner, memory_order_relaxed)(workers, pieces, multiply, &product);
}

__attribute__((constructor)) static void use_one_thread(void) { scipy_openblas_set_num_threads(1); }

void quire_blas_set_workers(quire_runner runner, void* workers) {
  atomic_store_explicit(&current_runner, runner, memory_order_relaxed);
  atomic_store_explicit(&current_workers, workers, memory_order_release);
}

uint64_t quire_blas_calls(void) { return atomic_load_explicit(&calls, memory_order_relaxed); }
