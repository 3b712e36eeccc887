#include "cpu/kernels.h"

#include <type_traits>
#include <utility>

#if defined(__AVX2__)
// GCC 12 warns of what its own header leaves undefined on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/head_dims.h"

// Compiled once per instruction set, with QUIRE_ISA naming it and QUIRE_LANES its floats per
// vector. What is included below stands in that set's own namespace. Nothing from the standard
// library that is a function may be called here or there: the linker keeps one copy of an inline
// function, and it must not be one that needs AVX-512.
namespace quire::cpu::QUIRE_ISA {
namespace {

#include "cpu/simd.h"

// Registers that may hold sums: half of them, and more where weights are floats in memory.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr size_t kSumRegisters = 16;
constexpr size_t kTallSums = 24;
#else
constexpr size_t kSumRegisters = 8;
constexpr size_t kTallSums = 12;
#endif

#include "cpu/numbers.h"
#include "cpu/softmax.h"
#include "cpu/decode.h"
#include "cpu/chunk.h"
#include "cpu/layer.h"
#include "cpu/delta.h"
#include "cpu/choose.h"
#include "cpu/multiply.h"
#include "cpu/digits.h"
#if defined(QUIRE_DOTS)
#include "cpu/multiply_codes_dots.h"
#endif
#if defined(__AVX512BF16__)
#include "cpu/multiply_bfloat16.h"
#endif
#if defined(__AMX_INT8__)
#include "cpu/tiles.h"
#include "cpu/multiply_amx.h"
#include "cpu/multiply_codes_amx.h"
#endif
#include "cpu/multiply_any.h"

void finish(const HeadShape& shape, const float* partials, size_t count, float* out) {
  const size_t size = Partial::floats(shape.query_heads, shape.head_dim);
  float joined[kMaxHeadDim];
  for (size_t head = 0; head < shape.query_heads; ++head) {
    float highest = kNoScore;
    float weight = 0.0f;
    for (size_t i = 0; i < shape.head_dim; ++i) {
      joined[i] = 0.0f;
    }
    for (size_t p = 0; p < count; ++p) {
      const Partial part =
          Partial::at(const_cast<float*>(partials) + p * size, shape.query_heads);
      join(highest, weight, joined, part.highest[head], part.weight[head],
           part.values + head * shape.head_dim, shape.head_dim);
    }
    divide(shape.type, joined, weight, shape.head_dim, out + head * shape.head_dim);
  }
}

}  // namespace

#define QUIRE_TEXT_OF(x) #x
#define QUIRE_NAME_OF(x) QUIRE_TEXT_OF(x)

extern const Kernels kernels;
const Kernels kernels = {
    QUIRE_NAME_OF(QUIRE_ISA), to_bfloat16, from_bfloat16, prepare_queries, attend_split,
    finish, attend_chunk, {prepared_bytes, prepare, multiply},
    {rms_norm, gate, rotate, add, add_scaled, softmax}, {convolve, normalize, recur},
    {largest, weigh, sum_from, collect},
};

}  // namespace quire::cpu::QUIRE_ISA
