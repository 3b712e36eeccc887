#include "ops/products.h"

#include <dlfcn.h>

#include <stdexcept>

#include "blas/products.h"

namespace quire::ops {
namespace {

// While another operation holds the pool, its caller's thread does the work alone: the pieces are
// the same, and so is the product.
void run_pieces(void* workers, size_t pieces, quire_piece piece, const void* product) {
  ThreadPool& pool = static_cast<CpuWorkers*>(workers)->pool;
  if (const auto held = pool.try_hold()) {
    pool.run(pieces, [&](size_t index, size_t) { piece(product, index); });
    return;
  }
  for (size_t index = 0; index < pieces; ++index) {
    piece(product, index);
  }
}

}  // namespace

void multiply_on(CpuWorkers& workers) {
  // The library is loaded before MLX and before us, so it cannot be linked: it is looked up.
  auto* const set_workers = reinterpret_cast<quire_blas_set_workers_function*>(
      dlsym(RTLD_DEFAULT, "quire_blas_set_workers"));
  if (set_workers == nullptr) {
    throw std::logic_error("MLX multiplies with its own BLAS, which has its own threads");
  }
  set_workers(run_pieces, &workers);
}

}  // namespace quire::ops
