// Linear layers by multiplying and adding float32, whatever the weights are stored as. Included
// inside an instruction set's namespace, as simd.h is.

constexpr size_t kPanelVecs = kPanelOutputs / kLanes;
static_assert(kPanelOutputs % kLanes == 0);
// Weights are asked for so far ahead.
constexpr size_t kWeightsAhead = 2048;

// What is read kWeightsAhead bytes after `at`, a place in a panel, where `panels` are read at the
// same time: at a panel's end, what is read there next. From the panel's beginning.
constexpr size_t ahead_of(size_t at, size_t panel_bytes, size_t panels) {
  const size_t next = at + kWeightsAhead;
  return next < panel_bytes ? next : next + (panels - 1) * panel_bytes;
}

// Calls body(first panel, panels) for runs of kMostPanels, and for what is left.
template <class Body>
void for_panel_runs(size_t first, size_t panels, const Body& body) {
  for (size_t p = 0; p < panels; p += kMostPanels) {
    body(first + p, panels - p < kMostPanels ? panels - p : kMostPanels);
  }
}

// What a call multiplies: rows [0, rows) of x, as prepared.
struct ProductCall {
  const LinearShape& shape;
  const std::byte* packed;
  const std::byte* x;
  size_t rows;
  float* out;
  size_t out_stride;

  const std::byte* panel(size_t p) const { return packed + p * shape.panel_bytes(); }
};

// A panel's weights in their order: begin() is called before every kPairs pairs of inputs; pair()
// gives those of an even input and of the odd one behind it.
template <class Number>
struct Plain {
  static constexpr size_t kPairs = 1;
  const Number* at;

  void start(const LinearShape&, const std::byte* panel) {
    at = reinterpret_cast<const Number*>(panel);
  }
  void begin(size_t) {
    const std::byte* const ahead = reinterpret_cast<const std::byte*>(at) + kWeightsAhead;
    for (size_t line = 0; line < 2 * kPanelOutputs * sizeof(Number); line += kLineBytes) {
      prefetch(ahead + line);
    }
  }
  void pair(size_t, Vec* even, Vec* odd) {
    for (size_t v = 0; v < kPanelVecs; ++v) {
      if constexpr (sizeof(Number) == 2) {
        load_pair(at + 2 * v * kLanes, even[v], odd[v]);
      } else {
        even[v] = load(at + v * kLanes);
        odd[v] = load(at + kPanelOutputs + v * kLanes);
      }
    }
    at += 2 * kPanelOutputs;
  }
};

// weight = code * scale + bias
template <size_t Bits, class Scale>
struct Codes {
  static constexpr size_t kPairs = 16 / Bits;  // of a word
  const std::byte* at;
  size_t group;
  Vec scale[kPanelVecs] = {};
  Vec bias[kPanelVecs] = {};
  BitVec words[kPanelVecs] = {};

  void start(const LinearShape& shape, const std::byte* panel) {
    at = panel;
    group = shape.group;
  }
  void begin(size_t input) {
    if (input % group == 0) {
      Plain<Scale> scales;
      scales.at = reinterpret_cast<const Scale*>(at);
      scales.pair(0, scale, bias);
      at += 2 * kPanelOutputs * sizeof(Scale);
    }
    prefetch(at + kWeightsAhead);
    for (size_t v = 0; v < kPanelVecs; ++v) {
      words[v] = reinterpret_cast<const UnalignedBits*>(at)[v];
    }
    at += kPanelOutputs * sizeof(uint32_t);
  }
  void pair(size_t number, Vec* even, Vec* odd) {
    const auto shift = static_cast<uint32_t>(number % 2 * 16 + number / 2 * Bits);
    for (size_t v = 0; v < kPanelVecs; ++v) {
      even[v] = fma(number_of(words[v] >> shift), scale[v], bias[v]);
      odd[v] = fma(number_of(words[v] >> (shift + 8)), scale[v], bias[v]);
    }
  }
  static Vec number_of(BitVec code) {
    return __builtin_convertvector(
        reinterpret_cast<IntVec>(code & ((uint32_t{1} << Bits) - 1)), Vec);
  }
};

template <class Body>
void with_weights(const LinearShape& shape, const Body& body) {
  const bool narrow = shape.scales == ScaleType::bfloat16;
  switch (shape.type) {
    case WeightType::bfloat16: return body(Plain<uint16_t>{});
    case WeightType::float32: return body(Plain<float>{});
    case WeightType::bits4: return narrow ? body(Codes<4, uint16_t>{}) : body(Codes<4, float>{});
    default: return narrow ? body(Codes<8, uint16_t>{}) : body(Codes<8, float>{});
  }
}

// The last panel may have fewer outputs than others.
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
  for (size_t i = 0; first + i < shape.outputs; ++i) {
    row[first + i] = all_of_them[i];
  }
}

// R rows of x by P panels.
template <class Weights, size_t P, size_t R>
void multiply_block(
    const LinearShape& shape, const std::byte* packed, const float* x, size_t first, float* out,
    size_t out_stride) {
  Vec sums[R][P][kPanelVecs] = {};
  Weights weights[P];
  for (size_t p = 0; p < P; ++p) {
    weights[p].start(shape, packed + (first + p) * shape.panel_bytes());
  }
  const auto add = [&](size_t input, size_t number, bool has_odd) __attribute__((always_inline)) {
    for (size_t p = 0; p < P; ++p) {
      Vec even[kPanelVecs];
      Vec odd[kPanelVecs];
      weights[p].pair(number, even, odd);
      for (size_t r = 0; r < R; ++r) {
        const float* const row = x + r * shape.inputs + input;
        const Vec even_x = all(row[0]);
        const Vec odd_x = all(has_odd ? row[1] : 0.0f);
        for (size_t v = 0; v < kPanelVecs; ++v) {
          sums[r][p][v] = fma(even_x, even[v], sums[r][p][v]);
          sums[r][p][v] = fma(odd_x, odd[v], sums[r][p][v]);
        }
      }
    }
  };
  constexpr size_t kStep = 2 * Weights::kPairs;
  size_t input = 0;
  for (; input + kStep <= shape.inputs; input += kStep) {
    for (size_t p = 0; p < P; ++p) {
      weights[p].begin(input);
    }
    for (size_t number = 0; number < Weights::kPairs; ++number) {
      add(input + 2 * number, number, true);
    }
  }
  if constexpr (Weights::kPairs == 1) {
    if (input < shape.inputs) {  // an odd number of inputs
      add(input, 0, false);
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t p = 0; p < P; ++p) {
      store_panel(shape, first + p, sums[r][p], out + r * out_stride);
    }
  }
}

// As many sums as there are registers for them: of many rows by one panel, so that a weight is
// widened once for all of them; where there are fewer rows, by more panels, so that sums do not
// wait for each other.
constexpr size_t kSums = kSumRegisters / kPanelVecs;

// Rows [0, rows), R at a time, by P panels at a time; what is left of the panels one by one.
template <class Weights, size_t P, size_t R>
void multiply_rows(
    const LinearShape& shape, const std::byte* packed, const float* x, size_t rows, size_t first,
    size_t panels, float* out, size_t out_stride) {
  size_t panel = 0;
  for (; panel + P <= panels; panel += P) {
    for (size_t r = 0; r < rows; r += R) {
      multiply_block<Weights, P, R>(shape, packed, x + r * shape.inputs, first + panel,
                                    out + r * out_stride, out_stride);
    }
  }
  if constexpr (P > 1) {
    multiply_rows<Weights, 1, R>(shape, packed, x, rows, first + panel, panels - panel, out,
                                 out_stride);
  }
}

// R rows at a time, and those that are left by fewer.
template <class Weights, size_t R>
void multiply_by(
    const LinearShape& shape, const std::byte* packed, const float* x, size_t rows, size_t first,
    size_t panels, float* out, size_t out_stride) {
  constexpr size_t P = kSums / R < kMostPanels ? kSums / R : kMostPanels;
  const size_t here = rows / R * R;
  multiply_rows<Weights, P, R>(shape, packed, x, here, first, panels, out, out_stride);
  if constexpr (R > 1) {
    if (here < rows) {
      multiply_by<Weights, R / 2>(shape, packed, x + here * shape.inputs, rows - here, first,
                                  panels, out + here * out_stride, out_stride);
    }
  }
}

// Rows of x as they are.
size_t row_bytes(const LinearShape& shape, size_t rows) {
  return rows * shape.inputs * sizeof(float);
}

void prepare_row(const LinearShape& shape, const float* x, size_t row, std::byte* prepared) {
  __builtin_memcpy(prepared + row_bytes(shape, row), x, row_bytes(shape, 1));
}

void multiply_added(
    const LinearShape& shape, const std::byte* packed, const std::byte* prepared, size_t rows,
    size_t first, size_t panels, float* out, size_t out_stride) {
  const auto* x = reinterpret_cast<const float*>(prepared);
  with_weights(shape, [&]<class Weights>(Weights) {
    multiply_by<Weights, kSums>(shape, packed, x, rows, first, panels, out, out_stride);
  });
}
