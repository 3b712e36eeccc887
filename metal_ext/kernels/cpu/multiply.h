// Linear layers in float32, for weights of every type, which are packed in panels (linear.h).

constexpr size_t kPanelVecs = kPanelOutputs / kLanes;
static_assert(kPanelOutputs % kLanes == 0);
// Weights are prefetched this many bytes before they are read.
constexpr size_t kWeightsAhead = 2048;

// Returns the offset in a panel to prefetch while offset `at` of `panels` adjacent panels is read.
// Past a panel's end, the offset lies in the panel that is `panels` further on.
constexpr size_t ahead_of(size_t at, size_t panel_bytes, size_t panels) {
  const size_t next = at + kWeightsAhead;
  return next < panel_bytes ? next : next + (panels - 1) * panel_bytes;
}

// Calls body(first panel, number of panels) for runs of Most panels. The last run may be shorter.
template <size_t Most = kMostPanels, class Body>
void for_panel_runs(size_t first, size_t panels, const Body& body) {
  for (size_t p = 0; p < panels; p += Most) {
    body(first + p, panels - p < Most ? panels - p : Most);
  }
}

// Cuts rows [row, end) and panels [first, first + panels) into blocks of R rows by P panels, with
// fewer panels at the end. Calls body.template operator()<P, R>(panel, row) for each block.
template <size_t P, size_t R, class Body>
void for_panels(size_t row, size_t end, size_t first, size_t panels, const Body& body) {
  size_t p = 0;
  for (; p + P <= panels; p += P) {
    for (size_t r = row; r < end; r += R) {
      body.template operator()<P, R>(first + p, r);
    }
  }
  if constexpr (P > 1) {
    if (p < panels) {
      for_panels<P / 2, R>(row, end, first + p, panels - p, body);
    }
  }
}

// The number of panels to multiply with R rows at once. R times this number is at most `Sums`.
template <size_t Sums, size_t R>
constexpr size_t kPanelsOf = Sums / R >= 4 ? 4 : Sums / R >= 2 ? 2 : 1;

// Calls for_panels() for rows [0, rows), in as few blocks of at most R rows as possible. All blocks
// have the same size, or one row less: a much shorter block would have too few independent sums to
// keep the arithmetic busy. With fewer rows, a block has more panels.
template <size_t Sums, size_t R, class Body>
void for_blocks(size_t rows, size_t first, size_t panels, const Body& body) {
  const size_t blocks = (rows + R - 1) / R;
  const size_t smaller = blocks * R - rows;
  if constexpr (R > 1) {
    if (smaller >= blocks) {
      return for_blocks<Sums, R - 1>(rows, first, panels, body);
    }
    const size_t end = (blocks - smaller) * R;
    for_panels<kPanelsOf<Sums, R>, R>(0, end, first, panels, body);
    for_panels<kPanelsOf<Sums, R - 1>, R - 1>(end, rows, first, panels, body);
  } else {
    for_panels<kPanelsOf<Sums, R>, R>(0, rows, first, panels, body);
  }
}
static_assert(kMostPanels == 4);

// The arguments of a multiply(): the prepared rows [0, rows) of x, and the packed weights.
struct ProductCall {
  const LinearShape& shape;
  const std::byte* packed;
  const std::byte* x;
  size_t rows;
  float* out;
  size_t out_stride;

  const std::byte* panel(size_t p) const { return packed + p * shape.panel_bytes(); }
  const float* floats(size_t row) const;  // a row of x that was prepared as float32
};

// Reads a panel's weights (or scales and biases) of an even input and of the next, odd input.
template <class Number>
inline void read_pair(const Number* at, Vec* even, Vec* odd) {
  for (size_t v = 0; v < kPanelVecs; ++v) {
    if constexpr (sizeof(Number) == 2) {
      load_pair(at + 2 * v * kLanes, even[v], odd[v]);
    } else {
      even[v] = load(at + v * kLanes);
      odd[v] = load(at + kPanelOutputs + v * kLanes);
    }
  }
}

// Reads a group's exponents in a panel of E2M1 codes, as scales and biases.
inline void read_exponents(const uint8_t* at, Vec* scale, Vec* bias) {
  const IntVec lowest = 0x00400000 - IntVec{};  // 2^-127, of exponent 0, is a subnormal float
  for (size_t v = 0; v < kPanelVecs; ++v) {
    IntVec bits = {};
#pragma GCC unroll 16
    for (size_t lane = 0; lane < kLanes; ++lane) {
      bits[lane] = at[v * kLanes + lane];
    }
    bits <<= 23;
    scale[v] = reinterpret_cast<Vec>(bits > lowest ? bits : lowest) * all(0.5f);
    bias[v] = scale[v] * all(-kE2m1Zero);
  }
}

// Returns the numbers that E2M1 codes stand for (linear.h). Each byte of both has one.
inline BitVec e2m1_numbers(BitVec codes) {
#if defined(__AVX512BW__)
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kE2m1Numbers));
  return reinterpret_cast<BitVec>(
      _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kE2m1Numbers));
  return reinterpret_cast<BitVec>(
      _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), reinterpret_cast<__m256i>(codes)));
#elif defined(__aarch64__)
  return reinterpret_cast<BitVec>(
      vqtbl1q_u8(vld1q_u8(kE2m1Numbers), reinterpret_cast<uint8x16_t>(codes)));
#else
  // SSE2 has no lookup. Comparisons give 0 or -1.
  typedef int8_t Bytes __attribute__((vector_size(kLanes * 4)));
  const Bytes code = reinterpret_cast<Bytes>(codes);
  const Bytes size = code & 7;
  const Bytes twice = size + ((size > 4) & (size - 4)) + ((size > 6) & 2);
  const Bytes minus = code > 7;
  return reinterpret_cast<BitVec>((twice ^ minus) - minus + kE2m1Zero);
#endif
}

// Reads a panel's plain weights in order. Callers call begin() before every kPairs calls of pair(),
// which returns the weights of an even input and of the next, odd input.
template <class Number>
struct Plain {
  static constexpr bool kCodes = false;
  static constexpr size_t kPairs = 1;
  const Number* at;

  void start(const std::byte* panel) {
    at = reinterpret_cast<const Number*>(panel);
  }
  void begin() {
    const std::byte* const ahead = reinterpret_cast<const std::byte*>(at) + kWeightsAhead;
    for (size_t line = 0; line < 2 * kPanelOutputs * sizeof(Number); line += kLineBytes) {
      prefetch(ahead + line);
    }
  }
  void pair(size_t, Vec* even, Vec* odd) {
    read_pair(at, even, odd);
    at += 2 * kPanelOutputs;
  }
};

// Reads a panel's codes. A weight is code * scale + bias, so a group of inputs adds (sum of codes
// times x) * scale + (sum of x) * bias to an output.
template <size_t Bits, class Scale>
struct Codes {
  static constexpr bool kCodes = true;
  static constexpr size_t kPairs = 16 / Bits;  // pairs of codes in a word of 32 bits
  const std::byte* at;
  const std::byte* scales = nullptr;  // the scales of the current group
  BitVec words[kPanelVecs] = {};

  void start(const std::byte* panel) { at = panel; }
  void start_group() {
    scales = at;
    at += 2 * kPanelOutputs * sizeof(Scale);
  }
  void begin() {
    prefetch(at + kWeightsAhead);
    for (size_t v = 0; v < kPanelVecs; ++v) {
      words[v] = reinterpret_cast<const UnalignedBits*>(at)[v];
    }
    at += kPanelOutputs * sizeof(uint32_t);
  }
  void pair(size_t number, Vec* even, Vec* odd) {
    const auto shift = static_cast<uint32_t>(number % 2 * 16 + number / 2 * Bits);
    for (size_t v = 0; v < kPanelVecs; ++v) {
      even[v] = number_of(words[v] >> shift);
      odd[v] = number_of(words[v] >> (shift + 8));
    }
  }
  // Returns `total` plus a group with the sums `codes` (of code * input) and `x` (of inputs).
  Vec close(size_t v, Vec codes, float x, Vec total) const {
    Vec scale[kPanelVecs];
    Vec bias[kPanelVecs];
    read_pair(reinterpret_cast<const Scale*>(scales), scale, bias);
    return fma(codes, scale[v], fma(all(x), bias[v], total));
  }
  static Vec number_of(BitVec code) {
    return __builtin_convertvector(
        reinterpret_cast<IntVec>(code & ((uint32_t{1} << Bits) - 1)), Vec);
  }
};

// Reads a panel's E2M1 codes, as numbers of 8 bits.
struct E2m1Codes {
  static constexpr bool kCodes = true;
  static constexpr size_t kPairs = 4;
  const std::byte* at;
  Vec scale[kPanelVecs];  // of the current group
  Vec bias[kPanelVecs];
  BitVec words[2][kPanelVecs];  // the numbers of four inputs, and of the next four

  void start(const std::byte* panel) { at = panel; }
  void start_group() {
    read_exponents(reinterpret_cast<const uint8_t*>(at), scale, bias);
    at += kPanelOutputs;
  }
  void begin() {
    prefetch(at + kWeightsAhead);
    for (size_t v = 0; v < kPanelVecs; ++v) {
      const BitVec both = reinterpret_cast<const UnalignedBits*>(at)[v];
      words[0][v] = e2m1_numbers(both & 0x0f0f0f0fu);
      words[1][v] = e2m1_numbers(both >> 4 & 0x0f0f0f0fu);
    }
    at += kPanelOutputs * sizeof(uint32_t);
  }
  void pair(size_t number, Vec* even, Vec* odd) {
    const auto shift = static_cast<uint32_t>(number % 2 * 16);
    for (size_t v = 0; v < kPanelVecs; ++v) {
      even[v] = Codes<8, float>::number_of(words[number / 2][v] >> shift);
      odd[v] = Codes<8, float>::number_of(words[number / 2][v] >> (shift + 8));
    }
  }
  Vec close(size_t v, Vec codes, float x, Vec total) const {
    return fma(codes, scale[v], fma(all(x), bias[v], total));
  }
};

template <class Body>
void with_weights(const LinearShape& shape, const Body& body) {
  const bool narrow = shape.scales == ScaleType::bfloat16;
  switch (shape.type) {
    case WeightType::bfloat16: return body(Plain<uint16_t>{});
    case WeightType::float32: return body(Plain<float>{});
    case WeightType::e2m1: return body(E2m1Codes{});
    case WeightType::bits4: return narrow ? body(Codes<4, uint16_t>{}) : body(Codes<4, float>{});
    default: return narrow ? body(Codes<8, uint16_t>{}) : body(Codes<8, float>{});
  }
}

// Stores a row's kPanelOutputs sums in `row`. The last panel of a layer may have fewer outputs.
inline void store_sums_of(const LinearShape& shape, size_t panel, const float* sums, float* row) {
  const size_t first = panel * kPanelOutputs;
  const size_t left = shape.outputs - first;
  const size_t count = left < kPanelOutputs ? left : kPanelOutputs;
  __builtin_memcpy(row + first, sums, count * sizeof(float));
}

inline void store_panel(const LinearShape& shape, size_t panel, const Vec* sums, float* row) {
  const size_t first = panel * kPanelOutputs;
  if (first + kPanelOutputs <= shape.outputs) {
    for (size_t v = 0; v < kPanelVecs; ++v) {
      store(row + first + v * kLanes, sums[v]);
    }
    return;
  }
  float all_of_them[kPanelOutputs];
  for (size_t v = 0; v < kPanelVecs; ++v) {
    store(all_of_them + v * kLanes, sums[v]);
  }
  store_sums_of(shape, panel, all_of_them, row);
}

// Rounds a row's size up to an odd number of cache lines, which spreads rows over a cache's sets.
constexpr size_t odd_lines(size_t bytes) {
  return (rounded_up(bytes, kLineBytes) / kLineBytes | 1) * kLineBytes;
}

// Returns the number of floats in a prepared row: x, and for quantized weights each group's sum.
constexpr size_t floats_per_row(const LinearShape& shape) {
  const size_t floats = shape.inputs + (shape.quantized() ? shape.groups() : 0);
  return odd_lines(floats * sizeof(float)) / sizeof(float);
}

size_t row_bytes(const LinearShape& shape, size_t rows) {
  return rows * floats_per_row(shape) * sizeof(float);
}

const float* ProductCall::floats(size_t row) const {
  return reinterpret_cast<const float*>(x + row_bytes(shape, row));
}

void prepare_row(const LinearShape& shape, const float* x, size_t row, std::byte* prepared) {
  auto* const to = reinterpret_cast<float*>(prepared + row_bytes(shape, row));
  __builtin_memcpy(to, x, shape.inputs * sizeof(float));
  if (shape.quantized()) {
    for (size_t g = 0; g < shape.groups(); ++g, x += shape.group) {
      Vec sum = {};
      for (size_t i = 0; i < shape.group; i += kLanes) {
        sum += load(x + i);
      }
      to[shape.inputs + g] = sum_of(sum);
    }
  }
}

// The products of R rows of x and P panels: sums over the inputs.
template <size_t P, size_t R>
struct Sums {
  Vec at[R][P][kPanelVecs] = {};

  void store_to(const LinearShape& shape, size_t first, float* out, size_t out_stride) const {
    for (size_t r = 0; r < R; ++r) {
      for (size_t p = 0; p < P; ++p) {
        store_panel(shape, first + p, at[r][p], out + r * out_stride);
      }
    }
  }
};

// Adds the products over inputs [from, to) to the sums. With plain weights, the number of inputs
// may be odd. Loops over sums are unrolled, because otherwise compilers keep the sums in memory.
template <class Weights, size_t P, size_t R>
inline void add_inputs(const LinearShape& shape, Weights* weights, const float* x, size_t from,
                       size_t to, Sums<P, R>& sums) {
  const auto add = [&](size_t input, size_t number, auto has_odd) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (size_t p = 0; p < P; ++p) {
      Vec even[kPanelVecs];
      Vec odd[kPanelVecs];
      weights[p].pair(number, even, odd);
#pragma GCC unroll 16
      for (size_t r = 0; r < R; ++r) {
        const float* const row = x + r * floats_per_row(shape) + input;
        for (size_t v = 0; v < kPanelVecs; ++v) {
          sums.at[r][p][v] = fma(all(row[0]), even[v], sums.at[r][p][v]);
          if constexpr (has_odd) {
            sums.at[r][p][v] = fma(all(row[1]), odd[v], sums.at[r][p][v]);
          }
        }
      }
    }
  };
  constexpr size_t kStep = 2 * Weights::kPairs;
  size_t input = from;
  for (; input + kStep <= to; input += kStep) {
    for (size_t p = 0; p < P; ++p) {
      weights[p].begin();
    }
#pragma GCC unroll 4
    for (size_t number = 0; number < Weights::kPairs; ++number) {
      add(input + 2 * number, number, std::true_type{});
    }
  }
  if constexpr (!Weights::kCodes) {
    if (input < to) {
      add(input, 0, std::false_type{});
    }
  }
}

template <class Weights, size_t P, size_t R>
[[gnu::noinline]] void multiply_block(
    const LinearShape& shape, const std::byte* packed, const float* x, size_t first, float* out,
    size_t out_stride) {
  Sums<P, R> totals;
  Weights weights[P];
  for (size_t p = 0; p < P; ++p) {
    weights[p].start(packed + (first + p) * shape.panel_bytes());
  }
  if constexpr (Weights::kCodes) {
    for (size_t g = 0; g < shape.groups(); ++g) {
      for (size_t p = 0; p < P; ++p) {
        weights[p].start_group();
      }
      Sums<P, R> sums;
      add_inputs(shape, weights, x, g * shape.group, (g + 1) * shape.group, sums);
      for (size_t r = 0; r < R; ++r) {
        const float of_x = x[r * floats_per_row(shape) + shape.inputs + g];
        for (size_t p = 0; p < P; ++p) {
          for (size_t v = 0; v < kPanelVecs; ++v) {
            Vec& total = totals.at[r][p][v];
            total = weights[p].close(v, sums.at[r][p][v], of_x, total);
          }
        }
      }
    }
  } else {
    add_inputs(shape, weights, x, 0, shape.inputs, totals);
  }
  totals.store_to(shape, first, out, out_stride);
}

// With kLeastTallRows rows or more, each group's codes are converted to floats in memory before
// the multiplication, so that all registers are free for sums. The results have the same bits.
constexpr size_t kLeastTallRows = 3;
constexpr size_t kTallPanels = 2;
constexpr size_t kMostTallRows = 12;
constexpr size_t kTallRows =
    kTallSums / kPanelVecs < kMostTallRows ? kTallSums / kPanelVecs : kMostTallRows;

template <class Weights>
struct TallGroup {
  alignas(64) float codes[kMaxGroup][kPanelOutputs];
  Weights weights;

  void read(size_t group) {
    weights.start_group();
    for (size_t i = 0; i < group; i += 2 * Weights::kPairs) {
      weights.begin();
#pragma GCC unroll 4
      for (size_t number = 0; number < Weights::kPairs; ++number) {
        Vec even[kPanelVecs];
        Vec odd[kPanelVecs];
        weights.pair(number, even, odd);
        for (size_t v = 0; v < kPanelVecs; ++v) {
          store(codes[i + 2 * number] + v * kLanes, even[v]);
          store(codes[i + 2 * number + 1] + v * kLanes, odd[v]);
        }
      }
    }
  }

  // Adds the group's part to `totals` [R][kPanelOutputs]. `x` has the group's inputs in R rows, and
  // `of_x` has the sum of each row's inputs. In both, rows lie `stride` numbers apart.
  template <size_t R>
  void add_to(const float* x, const float* of_x, size_t stride, size_t group,
              float* totals) const {
    Vec sums[R][kPanelVecs] = {};
    for (size_t i = 0; i < group; ++i) {
      Vec w[kPanelVecs];
      for (size_t v = 0; v < kPanelVecs; ++v) {
        w[v] = load(codes[i] + v * kLanes);
      }
#pragma GCC unroll 12
      for (size_t r = 0; r < R; ++r) {
        const Vec number = all(x[r * stride + i]);
        for (size_t v = 0; v < kPanelVecs; ++v) {
          sums[r][v] = fma(number, w[v], sums[r][v]);
        }
      }
    }
    for (size_t r = 0; r < R; ++r) {
      for (size_t v = 0; v < kPanelVecs; ++v) {
        float* const total = totals + r * kPanelOutputs + v * kLanes;
        store(total, weights.close(v, sums[r][v], of_x[r * stride], load(total)));
      }
    }
  }
};

// Multiplies all rows of x by the panels [first, first + panels), at most kTallPanels.
template <class Weights>
void multiply_tall(const ProductCall& call, size_t first, size_t panels) {
  const LinearShape& shape = call.shape;
  TallGroup<Weights> groups[kTallPanels];
  float totals[kTallPanels][kMaxRows * kPanelOutputs];
  for (size_t p = 0; p < panels; ++p) {
    groups[p].weights.start(call.panel(first + p));
    __builtin_memset(totals[p], 0, call.rows * kPanelOutputs * sizeof(float));
  }
  const size_t stride = floats_per_row(shape);
  constexpr size_t kSums = kTallPanels * kTallRows;
  for (size_t g = 0; g < shape.groups(); ++g) {
    for (size_t p = 0; p < panels; ++p) {
      groups[p].read(shape.group);
    }
    const auto add = [&]<size_t P, size_t R>(size_t panel, size_t row) {
      const float* const x = call.floats(row);
      for (size_t p = panel; p < panel + P; ++p) {
        groups[p].template add_to<R>(x + g * shape.group, x + shape.inputs + g, stride,
                                     shape.group, totals[p] + row * kPanelOutputs);
      }
    };
    for_blocks<kSums, kTallRows>(call.rows, 0, panels, add);
  }
  for (size_t p = 0; p < panels; ++p) {
    for (size_t row = 0; row < call.rows; ++row) {
      store_sums_of(shape, first + p, totals[p] + row * kPanelOutputs,
                    call.out + row * call.out_stride);
    }
  }
}

void multiply_added(const ProductCall& call, size_t first, size_t panels) {
  with_weights(call.shape, [&]<class Weights>(Weights) {
    if constexpr (Weights::kCodes) {
      if (call.rows >= kLeastTallRows) {
        for_panel_runs<kTallPanels>(first, panels, [&](size_t from, size_t count) {
          multiply_tall<Weights>(call, from, count);
        });
        return;
      }
    }
    constexpr size_t kSums = kSumRegisters / kPanelVecs;
    constexpr size_t kRows = Weights::kCodes ? kLeastTallRows - 1 : kSums;
    const auto multiply = [&]<size_t P, size_t R>(size_t panel, size_t row) {
      multiply_block<Weights, P, R>(call.shape, call.packed, call.floats(row), panel,
                                    call.out + row * call.out_stride, call.out_stride);
    };
    for_blocks<kSums, kRows>(call.rows, first, panels, multiply);
  });
}
