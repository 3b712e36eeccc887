#include "cpu/kernels.h"

#include <type_traits>
#include <utility>

#if defined(__AVX2__)
// GCC 12 warns of values that its own header leaves undefined on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// All CPU kernels. This file and its includes are compiled once per instruction set. QUIRE_ISA is
// the set's name and namespace, QUIRE_LANES the number of floats in a vector. No file may call the
// standard library: the linker keeps one copy of an inline function, which might need AVX-512.
namespace quire::cpu::QUIRE_ISA {
namespace {

#include "cpu/simd.h"

// The number of registers for sums: half of all, or kTallSums if weights are floats in memory.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr size_t kSumRegisters = 16;
constexpr size_t kTallSums = 24;
#else
constexpr size_t kSumRegisters = 8;
constexpr size_t kTallSums = 12;
#endif

#include "cpu/softmax.h"
#include "cpu/decode.h"
#include "cpu/chunk.h"
#include "cpu/layer.h"
#include "cpu/delta.h"
#include "cpu/choose.h"
#include "cpu/multiply.h"
#include "cpu/fixed_point.h"
#if defined(QUIRE_DOTS)
#include "cpu/multiply_codes_dots.h"
#endif
#if defined(__AVX512BF16__)
#include "cpu/multiply_bfloat16.h"
#endif
#if defined(__AMX_INT8__)
#include "cpu/multiply_amx.h"
#include "cpu/multiply_codes_amx.h"
#endif

#if defined(QUIRE_DOTS)
template <WeightType Type>
void multiply_codes(const CodeCall& call, size_t first, size_t panels) {
#if defined(__AMX_INT8__)
  // With fewer rows, vector instructions beat the matrix unit, which always stores whole tiles.
  constexpr size_t kLeastTileRows = 5;
  if (call.rows >= kLeastTileRows) {
    for_panel_runs(first, panels, [&](size_t from, size_t count) {
      multiply_code_tiles<Type>(call, from, count);
    });
    _tile_release();
    return;
  }
#endif
  multiply_codes_by_rows<Type>(call, first, panels);
}
#endif

size_t prepared_bytes(const LinearShape& shape, size_t rows) {
  if (limbs_of(shape) > 0) {
    return rows * fixed_point_row_bytes(shape);
  }
#if defined(__AMX_BF16__)
  if (shape.type == WeightType::bfloat16) {
    return prepared_tile_bytes(shape, rows);
  }
#elif defined(__AVX512BF16__)
  if (takes_pairs(shape)) {
    return rows * pair_row_bytes(shape);
  }
#endif
  return row_bytes(shape, rows);
}

void prepare(const LinearShape& shape, const float* x, size_t row, std::byte* prepared) {
  if (limbs_of(shape) > 0) {
    return prepare_fixed_point(shape, x, row, prepared);
  }
#if defined(__AMX_BF16__)
  if (shape.type == WeightType::bfloat16) {
    return prepare_tiles(shape, x, row, prepared);
  }
#elif defined(__AVX512BF16__)
  if (takes_pairs(shape)) {
    return prepare_pairs(shape, x, row, prepared);
  }
#endif
  prepare_row(shape, x, row, prepared);
}

void multiply(
    const LinearShape& shape, const std::byte* packed, const std::byte* prepared, size_t rows,
    size_t first, size_t panels, float* out, size_t out_stride) {
  const ProductCall call{shape, packed, prepared, rows, out, out_stride};
#if defined(QUIRE_DOTS)
  if (limbs_of(shape) > 0) {
    const CodeCall codes{call};
    switch (shape.type) {
#if defined(QUIRE_WIDE_DOTS)
      case WeightType::bits8: return multiply_codes<WeightType::bits8>(codes, first, panels);
      case WeightType::e2m1: return multiply_codes<WeightType::e2m1>(codes, first, panels);
#endif
      default: return multiply_codes<WeightType::bits4>(codes, first, panels);
    }
  }
#endif
#if defined(__AMX_BF16__)
  if (shape.type == WeightType::bfloat16) {
    return multiply_tiles({call}, first, panels);
  }
#elif defined(__AVX512BF16__)
  if (takes_pairs(shape)) {
    return multiply_pairs(call, first, panels);
  }
#endif
  multiply_added(call, first, panels);
}

}  // namespace

#define QUIRE_TEXT_OF(x) #x
#define QUIRE_NAME_OF(x) QUIRE_TEXT_OF(x)

extern const Kernels kernels;
const Kernels kernels = {
    QUIRE_NAME_OF(QUIRE_ISA), to_bfloat16, from_bfloat16, prepare_queries, attend_split,
    finish, attend_chunk, {prepared_bytes, prepare, multiply},
    {rms_norm, gate, rotate, add, add_scaled, softmax}, {convolve, normalize, recur},
    {largest, weigh, collect, lead},
};

}  // namespace quire::cpu::QUIRE_ISA
