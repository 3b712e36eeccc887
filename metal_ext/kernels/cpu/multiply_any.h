// Which of an instruction set's products multiplies what. Included inside its namespace, as simd.h
// is, behind those that it has.

#if defined(QUIRE_DOTS)
template <size_t Bits>
void multiply_codes(const CodeCall& call, size_t first, size_t panels) {
#if defined(__AMX_INT8__)
  // With fewer rows the unit takes longer than vectors do: it stores whole tiles.
  constexpr size_t kLeastTileRows = 5;
  if (call.rows >= kLeastTileRows) {
    for_panel_runs(first, panels, [&](size_t from, size_t count) {
      multiply_code_tiles<Bits>(call, from, count);
    });
    _tile_release();
    return;
  }
#endif
  multiply_codes_by_rows<Bits>(call, first, panels);
}
#endif

size_t prepared_bytes(const LinearShape& shape, size_t rows) {
  if (digits_of(shape) > 0) {
    return rows * digit_row_bytes(shape);
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
  if (digits_of(shape) > 0) {
    return prepare_digits(shape, x, row, prepared);
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
  if (digits_of(shape) > 0) {
    const CodeCall codes{call};
    return shape.type == WeightType::bits4 ? multiply_codes<4>(codes, first, panels)
                                           : multiply_codes<8>(codes, first, panels);
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
