// Linear layers of 4 and 8 bits by dot products of bytes: codes times limbs (bytes of x).

// Returns a vector whose lanes all have the same four limbs (bytes of x), from 4 * part on.
inline IntVec four_of(const std::byte* limbs, size_t part) {
  int32_t four;
  __builtin_memcpy(&four, limbs + 4 * part, sizeof(four));
  return four - IntVec{};
}

// Sums of codes times one limb of x, for kLanes outputs. Some instruction sets first add products
// in 16 bits. Sums over kWordsAtOnce words of 4-bit codes fit: 4 * 2 * 2 * 15 * 127 < 2^15.
#if defined(__AVX512VNNI__)
constexpr size_t kWordsAtOnce = 1;
struct DotSum {
  IntVec sum = {};
  void add(const BitVec* codes, const std::byte* x, size_t part) {
    const auto limbs = reinterpret_cast<__m512i>(four_of(x, part));
    sum = reinterpret_cast<IntVec>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(codes[part]), limbs));
  }
  void close() {}
};
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr size_t kWordsAtOnce = 1;
struct DotSum {
  IntVec sum = {};
  // Adds codes[part] times four limbs of `x`, which the instruction repeats for each output.
  template <size_t Parts>
  void add(const BitVec (&codes)[Parts], const std::byte* x, size_t part) {
    std::conditional_t<Parts == 1, uint32_t, uint64_t> bits;
    __builtin_memcpy(&bits, x, sizeof(bits));
    const auto from = reinterpret_cast<int32x4_t>(sum);
    const auto bytes = reinterpret_cast<int8x16_t>(codes[part]);
    sum = reinterpret_cast<IntVec>(part == 0 ? vdotq_lane_s32(from, bytes, vcreate_s8(bits), 0)
                                             : vdotq_lane_s32(from, bytes, vcreate_s8(bits), 1));
  }
  void close() {}
};
#else
constexpr size_t kWordsAtOnce = 4;
struct DotSum {
  typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));
  IntVec sum = {};
  Shorts near = {};
  void add(const BitVec* codes, const std::byte* x, size_t part) {
    near += pairs(codes[part], four_of(x, part));
  }
  void close() {
    sum += fours(near);
    near = Shorts{};
  }
#if defined(__AVX512BW__)
  static Shorts pairs(BitVec codes, IntVec limbs) {
    return reinterpret_cast<Shorts>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(codes),
                                                         reinterpret_cast<__m512i>(limbs)));
  }
  static IntVec fours(Shorts twos) {
    return reinterpret_cast<IntVec>(
        _mm512_madd_epi16(reinterpret_cast<__m512i>(twos), _mm512_set1_epi16(1)));
  }
#else
  static Shorts pairs(BitVec codes, IntVec limbs) {
    return reinterpret_cast<Shorts>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(codes),
                                                         reinterpret_cast<__m256i>(limbs)));
  }
  static IntVec fours(Shorts twos) {
    return reinterpret_cast<IntVec>(
        _mm256_madd_epi16(reinterpret_cast<__m256i>(twos), _mm256_set1_epi16(1)));
  }
#endif
};
#endif

// Multiplies R rows of x by P panels. The loops are unrolled to keep the sums in registers.
template <WeightType Type, size_t Limbs, size_t P, size_t R>
[[gnu::noinline]] void multiply_code_rows(const CodeCall& call, size_t first, size_t row) {
  const LinearShape& shape = call.shape;
  const std::byte* const w = call.panel(first);
  const size_t panel_bytes = shape.panel_bytes();
  const std::byte* limbs = call.limbs(row, 0);
  const auto ahead = [&](size_t at) __attribute__((always_inline)) {
    const size_t from = ahead_of(at, panel_bytes, P);
    for (size_t p = 0; p < P; ++p) {
      prefetch_near(w + p * panel_bytes + from);
    }
  };
  const size_t words = shape.words_per_group();
  Vec totals[R][P][kPanelVecs] = {};
  size_t at = 0;
  for (size_t g = 0; g < shape.groups(); ++g) {
    const size_t scales = at;
    for (size_t line = 0; line < shape.scales_bytes(); line += kLineBytes) {
      ahead(at + line);
    }
    at += shape.scales_bytes();
    DotSum sums[R][P][kPanelVecs][Limbs];
    for (size_t word = 0; word < words; word += kWordsAtOnce) {
      for (size_t near = 0; near < kWordsAtOnce; ++near, at += kLineBytes) {
        ahead(at);
        BitVec codes[P][kPanelVecs][kCodeParts<Type>];
#pragma GCC unroll 4
        for (size_t p = 0; p < P; ++p) {
#pragma GCC unroll 4
          for (size_t v = 0; v < kPanelVecs; ++v) {
            read_codes<Type>(w + p * panel_bytes + at + v * sizeof(Vec), codes[p][v]);
          }
        }
#pragma GCC unroll 12
        for (size_t r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (size_t part = 0; part < kCodeParts<Type>; ++part) {
#pragma GCC unroll 3
            for (size_t limb = 0; limb < Limbs; ++limb) {
              const std::byte* const its = limbs + r * call.x_stride + limb * shape.group;
#pragma GCC unroll 4
              for (size_t p = 0; p < P; ++p) {
#pragma GCC unroll 4
                for (size_t v = 0; v < kPanelVecs; ++v) {
                  sums[r][p][v][limb].add(codes[p][v], its, part);
                }
              }
            }
          }
        }
        limbs += 4 * kCodeParts<Type>;
      }
#pragma GCC unroll 12
      for (size_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (size_t p = 0; p < P; ++p) {
#pragma GCC unroll 4
          for (size_t v = 0; v < kPanelVecs; ++v) {
#pragma GCC unroll 3
            for (size_t limb = 0; limb < Limbs; ++limb) {
              sums[r][p][v][limb].close();
            }
          }
        }
      }
    }
    limbs += (Limbs - 1) * shape.group;
#pragma GCC unroll 4
    for (size_t p = 0; p < P; ++p) {
      const GroupScales weights = scales_at<Type, Limbs>(shape, w + p * panel_bytes + scales);
#pragma GCC unroll 12
      for (size_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (size_t v = 0; v < kPanelVecs; ++v) {
          IntVec wholes[Limbs];
          for (size_t limb = 0; limb < Limbs; ++limb) {
            wholes[limb] = sums[r][p][v][limb].sum;
          }
          totals[r][p][v] = add_group<Limbs>(wholes, weights.scale[v], weights.bias[v],
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

// If x has one limb, a block has at most kDotSums pairs of a row and a panel, and kDotRows rows. If
// a panel is one vector, the sums of 24 pairs fit in registers. Other limits were measured: on
// arm64, a panel is four vectors, and 4 pairs leave half of the 32 registers for the rest.
constexpr size_t kDotSums = kLanes == kPanelOutputs ? 24 : kLanes == 8 ? 8 : 4;
constexpr size_t kDotRows = kLanes == kPanelOutputs ? 12 : kLanes == 8 ? 6 : 4;

template <WeightType Type>
void multiply_codes_by_rows(const CodeCall& call, size_t first, size_t panels) {
  with_limbs(call.shape, [&](auto limbs) {
    const auto multiply = [&]<size_t P, size_t R>(size_t panel, size_t row) {
      multiply_code_rows<Type, limbs, P, R>(call, panel, row);
    };
    constexpr size_t kRows = (kDotRows + limbs - 1) / limbs;
    for_blocks<kDotSums / limbs, kRows>(call.rows, first, panels, multiply);
  });
}
