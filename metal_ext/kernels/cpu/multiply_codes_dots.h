// Linear layers of 4 and 8 bits by instructions that add products of bytes: 4 codes times 4 digits
// of x at each output. Included inside an instruction set's namespace, as simd.h is.

// A sum of codes times a digit at each of kLanes outputs. Products of codes of 4 bits are added in
// 16 bits first where the instructions leave them there: kWordsAtOnce words of them fit,
// 4 * 2 * 2 * 15 * 127 < 2^15.
#if defined(__AVX512VNNI__)
constexpr size_t kWordsAtOnce = 1;
struct DotSum {
  IntVec sum = {};
  void add(BitVec codes, IntVec digits) {
    sum = reinterpret_cast<IntVec>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum),
                                                       reinterpret_cast<__m512i>(codes),
                                                       reinterpret_cast<__m512i>(digits)));
  }
  void close() {}
};
#else
constexpr size_t kWordsAtOnce = 4;
struct DotSum {
  typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));
  IntVec sum = {};
  Shorts near = {};
  void add(BitVec codes, IntVec digits) { near += pairs(codes, digits); }
  void close() {
    sum += fours(near);
    near = Shorts{};
  }
#if defined(__AVX512BW__)
  static Shorts pairs(BitVec codes, IntVec digits) {
    return reinterpret_cast<Shorts>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(codes),
                                                         reinterpret_cast<__m512i>(digits)));
  }
  static IntVec fours(Shorts twos) {
    return reinterpret_cast<IntVec>(
        _mm512_madd_epi16(reinterpret_cast<__m512i>(twos), _mm512_set1_epi16(1)));
  }
#else
  static Shorts pairs(BitVec codes, IntVec digits) {
    return reinterpret_cast<Shorts>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(codes),
                                                         reinterpret_cast<__m256i>(digits)));
  }
  static IntVec fours(Shorts twos) {
    return reinterpret_cast<IntVec>(
        _mm256_madd_epi16(reinterpret_cast<__m256i>(twos), _mm256_set1_epi16(1)));
  }
#endif
};
#endif

// R rows of x, from `row` on, by P panels. Loops over sums are unrolled at once: otherwise
// compilers keep the sums in memory.
template <size_t Bits, size_t Digits, size_t P, size_t R>
[[gnu::noinline]] void multiply_code_rows(const CodeCall& call, size_t first, size_t row) {
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
  Vec totals[R][P][kPanelVecs] = {};
  size_t at = 0;
  for (size_t g = 0; g < shape.groups(); ++g) {
    const size_t scales = at;
    for (size_t line = 0; line < shape.scales_bytes(); line += kLineBytes, at += kLineBytes) {
      ahead(at);
    }
    DotSum sums[R][P][kPanelVecs][Digits];
    for (size_t word = 0; word < shape.words_per_group(); word += kWordsAtOnce) {
      for (size_t near = 0; near < kWordsAtOnce; ++near, at += kLineBytes) {
        ahead(at);
        BitVec codes[P][kPanelVecs][kCodeParts<Bits>];
#pragma GCC unroll 4
        for (size_t p = 0; p < P; ++p) {
#pragma GCC unroll 2
          for (size_t v = 0; v < kPanelVecs; ++v) {
            read_codes<Bits>(w + p * panel_bytes + at + v * sizeof(Vec), codes[p][v]);
          }
        }
#pragma GCC unroll 12
        for (size_t r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (size_t part = 0; part < kCodeParts<Bits>; ++part) {
#pragma GCC unroll 3
            for (size_t digit = 0; digit < Digits; ++digit) {
              int32_t four;
              __builtin_memcpy(&four, digits + r * call.x_stride + digit * shape.group + 4 * part,
                               sizeof(four));
#pragma GCC unroll 4
              for (size_t p = 0; p < P; ++p) {
#pragma GCC unroll 2
                for (size_t v = 0; v < kPanelVecs; ++v) {
                  sums[r][p][v][digit].add(codes[p][v][part], four - IntVec{});
                }
              }
            }
          }
        }
        digits += 4 * kCodeParts<Bits>;
      }
#pragma GCC unroll 12
      for (size_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (size_t p = 0; p < P; ++p) {
#pragma GCC unroll 2
          for (size_t v = 0; v < kPanelVecs; ++v) {
#pragma GCC unroll 3
            for (size_t digit = 0; digit < Digits; ++digit) {
              sums[r][p][v][digit].close();
            }
          }
        }
      }
    }
    digits += (Digits - 1) * shape.group;
#pragma GCC unroll 4
    for (size_t p = 0; p < P; ++p) {
      const GroupScales weights = scales_at<Digits>(shape, w + p * panel_bytes + scales);
#pragma GCC unroll 12
      for (size_t r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (size_t v = 0; v < kPanelVecs; ++v) {
          IntVec wholes[Digits];
          for (size_t digit = 0; digit < Digits; ++digit) {
            wholes[digit] = sums[r][p][v][digit].sum;
          }
          totals[r][p][v] = add_group<Digits>(wholes, weights.scale[v], weights.bias[v],
                                              call.factors(row + r, g), totals[r][p][v]);
        }
      }
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t p = 0; p < P; ++p) {
      store_panel(shape, first + p, totals[r][p], call.out + (row + r) * call.out_stride);
    }
  }
}

// Sums of one digit and a panel, and rows of them: where vectors are whole panels there are
// registers for them, and else it was measured.
constexpr size_t kDotSums = kLanes == kPanelOutputs ? 24 : 8;
constexpr size_t kDotRows = kLanes == kPanelOutputs ? 12 : 6;

template <size_t Bits>
void multiply_codes_by_rows(const CodeCall& call, size_t first, size_t panels) {
  with_digits(call.shape, [&](auto digits) {
    const auto multiply = [&]<size_t P, size_t R>(size_t panel, size_t row) {
      multiply_code_rows<Bits, digits, P, R>(call, panel, row);
    };
    for_blocks<kDotSums / digits, kDotRows / digits>(0, call.rows, first, panels, multiply);
  });
}
