// Linear layers of 4 and 8 bits by AVX-512 VNNI: 4 codes times 4 digits of x at each of 16 outputs
// in one instruction. Included inside an instruction set's namespace, as simd.h is.

// R rows of x, from `row` on, by P panels.
template <size_t Bits, size_t P, size_t R>
void multiply_code_rows(const CodeCall& call, size_t first, size_t row) {
  const LinearShape& shape = call.shape;
  const std::byte* const w = call.panel(first);
  const size_t panel_bytes = shape.panel_bytes();
  const std::byte* digits = call.digits(row, 0);
  const auto ahead = [&](size_t at) __attribute__((always_inline)) {
    const size_t from = ahead_of(at, panel_bytes, P);
    for (size_t p = 0; p < P; ++p) {
      prefetch_near(w + p * panel_bytes + from);
    }
  };
  Vec totals[R][P] = {};
  size_t at = 0;
  for (size_t g = 0; g < shape.groups(); ++g) {
    const size_t scales = at;
    for (size_t line = 0; line < shape.scales_bytes(); line += kLineBytes, at += kLineBytes) {
      ahead(at);
    }
    __m512i sums[R][P][kDigits] = {};
    for (size_t word = 0; word < shape.words_per_group(); ++word, at += kLineBytes) {
      ahead(at);
      __m512i codes[P][Line<Bits>::kParts];
      for (size_t p = 0; p < P; ++p) {
        Line<Bits>::read(w + p * panel_bytes + at, codes[p]);
      }
      for (size_t r = 0; r < R; ++r) {
        for (size_t part = 0; part < Line<Bits>::kParts; ++part) {
          for (size_t digit = 0; digit < kDigits; ++digit) {
            int32_t four;
            __builtin_memcpy(&four, digits + r * call.x_stride + digit * shape.group + 4 * part,
                             sizeof(four));
            for (size_t p = 0; p < P; ++p) {
              sums[r][p][digit] = _mm512_dpbusd_epi32(sums[r][p][digit], codes[p][part],
                                                      _mm512_set1_epi32(four));
            }
          }
        }
      }
      digits += 4 * Line<Bits>::kParts;
    }
    digits += (kDigits - 1) * shape.group;
    for (size_t p = 0; p < P; ++p) {
      const GroupScales weights = scales_at(shape, w + p * panel_bytes + scales);
      for (size_t r = 0; r < R; ++r) {
        totals[r][p] =
            add_group(sums[r][p], weights, call.factors(row + r, g), totals[r][p]);
      }
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t p = 0; p < P; ++p) {
      store_panel(shape, first + p, &totals[r][p], call.out + (row + r) * call.out_stride);
    }
  }
}

// Rows [from, to), R at a time, by P panels at a time; what is left of the panels one by one.
template <size_t Bits, size_t P, size_t R>
void multiply_code_panels(const CodeCall& call, size_t from, size_t to, size_t first,
                          size_t panels) {
  size_t panel = 0;
  for (; panel + P <= panels; panel += P) {
    for (size_t row = from; row < to; row += R) {
      multiply_code_rows<Bits, P, R>(call, first + panel, row);
    }
  }
  if constexpr (P > 1) {
    multiply_code_panels<Bits, 1, R>(call, from, to, first + panel, panels - panel);
  }
}

// Four rows at a time, and those that are left. As many panels beside each other as there are
// registers for sums, of which a row of a panel has three.
template <size_t Bits>
void multiply_codes_by_rows(const CodeCall& call, size_t first, size_t panels) {
  const size_t fours = call.rows / 4 * 4;
  multiply_code_panels<Bits, 2, 4>(call, 0, fours, first, panels);
  switch (call.rows - fours) {
    case 3: return multiply_code_panels<Bits, 2, 3>(call, fours, call.rows, first, panels);
    case 2: return multiply_code_panels<Bits, 4, 2>(call, fours, call.rows, first, panels);
    case 1: return multiply_code_panels<Bits, 4, 1>(call, fours, call.rows, first, panels);
    default: return;
  }
}
