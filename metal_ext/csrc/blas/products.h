#pragma once

/* How products of matrices get threads: the library that multiplies (openblas.c) cuts a product
 * into pieces, and whoever has threads runs them. Plain C: both sides meet at run time only.
 */
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Computes one piece of the product that `product` describes. */
typedef void (*quire_piece)(const void* product, size_t index);

/* Calls piece(product, i) for every i below `pieces`, each once, in any order, on any threads. */
typedef void (*quire_runner)(void* workers, size_t pieces, quire_piece piece, const void* product);

/* From now on products run on `workers`, which must live as long as products may be under way. With
 * workers NULL each runs on the thread that asks for it. */
typedef void quire_blas_set_workers_function(quire_runner runner, void* workers);
quire_blas_set_workers_function quire_blas_set_workers;

/* How many products there have been: proof that MLX really uses this library. */
uint64_t quire_blas_calls(void);

#ifdef __cplusplus
}
#endif
