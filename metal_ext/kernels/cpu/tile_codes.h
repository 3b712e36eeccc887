// Linear layers of 4 and 8 bits on a matrix unit: whole numbers of bfloat16, whose sums over a
// group are scaled. Included inside an instruction set's namespace, as simd.h is.

// Four bits as whole bfloat16 numbers: a look-up takes five bits of every half word, so that the
// table stands there twice.
struct CodeTable {
  alignas(64) uint16_t numbers[32];
  CodeTable() {
    for (size_t i = 0; i < 32; ++i) {
      const auto number = static_cast<float>(i % 16);
      to_bfloat16(&number, numbers + i, 1);
    }
  }
};

// The codes of kInputStep inputs as a tile: [pairs][16 outputs][2].
template <size_t Bits>
inline void widen_codes(const CodeTable& table, const std::byte* words, uint16_t* tile) {
  constexpr size_t kPairs = 16 / Bits;
  for (size_t word = 0; word < kInputStep / 2 / kPairs; ++word) {
    const __m512i codes = _mm512_loadu_si512(words + word * kLineBytes);
    for (size_t number = 0; number < kPairs; ++number, tile += 2 * kPanelOutputs) {
      const auto shift = static_cast<unsigned>(number * Bits);
      if constexpr (Bits == 4) {
        _mm512_store_si512(tile, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, shift),
                                                         _mm512_load_si512(table.numbers)));
      } else {
        const auto bits = reinterpret_cast<BitVec>(codes);
        const Vec even = Codes<Bits, float>::number_of(bits >> shift);
        const Vec odd = Codes<Bits, float>::number_of(bits >> (16 + shift));
        *reinterpret_cast<BitVec*>(tile) =
            reinterpret_cast<BitVec>(odd) | (reinterpret_cast<BitVec>(even) >> 16);
      }
    }
  }
}

// Inputs of four panels whose codes are widened at a time: what stays in a core's cache.
constexpr size_t kSliceInputs = 1024;

struct Slice {
  alignas(64) uint16_t tiles[kMostPanels][kSliceInputs * kPanelOutputs];
  Vec scales[kMostPanels][kSliceInputs / kInputStep];
  Vec biases[kMostPanels][kSliceInputs / kInputStep];

  // Groups [from, from + count) of a panel.
  void read(const LinearShape& shape, const CodeTable& table, const std::byte* panel, size_t place,
            size_t from, size_t count) {
    const std::byte* group = panel + from * shape.group_bytes();
    uint16_t* tile = tiles[place];
    for (size_t g = 0; g < count; ++g, group += shape.group_bytes()) {
      for (size_t line = 0; line < shape.group_bytes(); line += kLineBytes) {
        prefetch(group + kWeightsAhead + line);
      }
      if (shape.scales == ScaleType::bfloat16) {
        load_pair(reinterpret_cast<const uint16_t*>(group), scales[place][g], biases[place][g]);
      } else {
        scales[place][g] = load(reinterpret_cast<const float*>(group));
        biases[place][g] = load(reinterpret_cast<const float*>(group) + kPanelOutputs);
      }
      const std::byte* words = group + shape.scales_bytes();
      for (size_t i = 0; i < shape.group; i += kInputStep, tile += 2 * kTileFloats) {
        shape.type == WeightType::bits4 ? widen_codes<4>(table, words, tile)
                                        : widen_codes<8>(table, words, tile);
        words += kInputStep * shape.bits() / 8 * kPanelOutputs;
      }
    }
  }
};

// Adds groups [from, from + count) of the slice's panels to a block's totals.
// totals: [rows][kMostPanels] vectors.
void add_groups(const TileCall& call, const Block& block, const Slice& slice, size_t from,
                size_t count, size_t panels, Vec* totals) {
  const LinearShape& shape = call.shape;
  const size_t next = x_block_bytes(shape);
  const size_t steps = shape.group / kInputStep;
  for (size_t p = 0; p < panels; p += block.panels()) {
    const size_t here = panels - p < block.panels() ? panels - p : block.panels();
    const std::byte* w[kMostPanels];
    for (size_t g = 0; g < count; ++g) {
      for (size_t i = 0; i < block.panels(); ++i) {
        const uint16_t* const tiles = slice.tiles[p + (i < here ? i : here - 1)];
        w[i] = reinterpret_cast<const std::byte*>(tiles + g * shape.group * kPanelOutputs);
      }
      TileSums sums;
      const std::byte* const x = call.x_tiles(block.row, (from + g) * shape.group);
      block.tall() ? sums.add<true>(x, next, w, steps, false)
                   : sums.add<false>(x, next, w, steps, false);
      for (size_t row = 0; row < block.count; ++row) {
        const Vec x_sum = call.x_sum(block.row + row, from + g);
        for (size_t i = 0; i < here; ++i) {
          Vec& total = totals[(block.row + row) * kMostPanels + p + i];
          total = fma(sums.of(block, row, i), slice.scales[p + i][g],
                      fma(x_sum, slice.biases[p + i][g], total));
        }
      }
    }
  }
}

// Panels [first, first + 1 to 4) of codes.
void multiply_codes(const TileCall& call, const CodeTable& table, size_t first, size_t panels) {
  const LinearShape& shape = call.shape;
  Vec totals[kMaxRows * kMostPanels];
  for (size_t i = 0; i < call.rows * kMostPanels; ++i) {
    totals[i] = Vec{};
  }
  Slice slice;
  const size_t most = call.rows <= kTileRows ? 1 : kSliceInputs / shape.group;
  for (size_t from = 0; from < shape.groups(); from += most) {
    const size_t count = shape.groups() - from < most ? shape.groups() - from : most;
    for (size_t p = 0; p < panels; ++p) {
      slice.read(shape, table, call.panel(first + p), p, from, count);
    }
    call.for_each_block([&](const Block& block) {
      if (from == 0 || call.rows > kTileRows) {
        block.configure();
      }
      add_groups(call, block, slice, from, count, panels, totals);
    });
  }
  for (size_t row = 0; row < call.rows; ++row) {
    for (size_t p = 0; p < panels; ++p) {
      store_panel(shape, first + p, totals + row * kMostPanels + p,
                  call.out + row * call.out_stride);
    }
  }
}
