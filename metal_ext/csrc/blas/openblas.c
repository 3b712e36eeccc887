/* MLX's Linux wheel brings a reference BLAS of one thread. Loaded into the global symbol scope
 * before MLX, this library answers for it: the dynamic linker takes the first cblas_sgemm it finds.
 */
#include <stdatomic.h>
#include <stdint.h>

#include "cblas.h"

static atomic_uint_fast64_t calls;

void cblas_sgemm(
    enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE trans_a, enum CBLAS_TRANSPOSE trans_b, blasint m,
    blasint n, blasint k, float alpha, const float* a, blasint lda, const float* b, blasint ldb,
    float beta, float* c, blasint ldc) {
  atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
  scipy_cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* How many products went through this library: proof that MLX really uses it. */
uint64_t quire_blas_calls(void) { return atomic_load_explicit(&calls, memory_order_relaxed); }

void quire_blas_set_threads(int threads) { scipy_openblas_set_num_threads(threads); }
