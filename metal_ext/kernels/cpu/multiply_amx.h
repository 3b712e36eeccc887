// Linear layers of bfloat16 on a matrix unit (Intel's AMX), which multiplies bfloat16 and adds
// float32. A row of x is cut into two rows of bfloat16 (part rows), whose sum has 16 of float32's
// 24 bits. Eight rows of x make a block of 16 part rows, which is stored as
//   [padded inputs / 32] tiles of [16 part rows][32] bfloat16

constexpr size_t kParts = 2;
constexpr size_t kTileRows = 16;  // number of part rows
constexpr size_t kBlockRows = kTileRows / kParts;
constexpr size_t kTileFloats = kTileRows * kPanelOutputs;
constexpr size_t kTileBytes = kTileFloats * sizeof(float);
constexpr size_t kTileSums = 4;  // number of the unit's tiles that have sums

size_t x_block_bytes(const LinearShape& shape) {
  return shape.padded_inputs() / kInputStep * kTileBytes;
}

size_t prepared_tile_bytes(const LinearShape& shape, size_t rows) {
  return rounded_up(rows, kBlockRows) / kBlockRows * x_block_bytes(shape);
}

// Cuts `n` (at most kInputStep) numbers into two bfloat16 parts, with zeros up to kInputStep.
inline void cut(const float* x, size_t n, uint16_t* upper, uint16_t* lower) {
  float whole[kInputStep];
  float rest[kInputStep];
  for (size_t i = 0; i < kInputStep; ++i) {
    whole[i] = i < n ? x[i] : 0.0f;
  }
  to_bfloat16(whole, upper, kInputStep);
  from_bfloat16(upper, rest, kInputStep);
  for (size_t i = 0; i < kInputStep; ++i) {
    rest[i] = whole[i] - rest[i];
  }
  to_bfloat16(rest, lower, kInputStep);
}

void prepare_tiles(const LinearShape& shape, const float* x, size_t row, std::byte* prepared) {
  std::byte* const block = prepared + row / kBlockRows * x_block_bytes(shape);
  auto* parts = reinterpret_cast<uint16_t*>(block) + row % kBlockRows * kParts * kInputStep;
  for (size_t i = 0; i < shape.inputs; i += kInputStep, parts += kTileRows * kInputStep) {
    cut(x + i, shape.inputs - i, parts, parts + kInputStep);
  }
}

// The sizes of the unit's tiles. Tiles 0 to 3 are sums, 4 and 5 part rows of x, 6 and 7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// A block of rows of x (two part rows each). Its sums cover 16 part rows by 4 panels, or 32 by 2.
struct Block {
  size_t row;    // the first row of x
  size_t count;  // number of rows of x, 1 to kTileRows
  bool tall() const { return kParts * count > kTileRows; }
  size_t panels() const { return tall() ? 2 : 4; }
  size_t tile_rows(bool second) const {
    const size_t parts = kParts * count;
    const size_t first = parts < kTileRows ? parts : kTileRows;
    return second && tall() ? parts - first : first;
  }
  // Returns the number of the tile that holds the sums of a part row and a panel.
  size_t tile_of(size_t part_row, size_t panel) const {
    return tall() ? part_row / kTileRows * 2 + panel : panel;
  }
  void configure() const {
    TileConfig config;
    for (size_t tile = 0; tile < 8; ++tile) {
      const bool second = tile == 2 || tile == 3 || tile == 5;
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? tile_rows(second) : kTileRows);
      config.row_bytes[tile] = kLineBytes;
    }
    _tile_loadconfig(&config);
  }
};

// Multiplies a tile of x by the panels' weights w, and adds the products to the sums. If Tall, also
// multiplies the tile at `x + next`.
template <bool Tall>
inline void add_tiles(const std::byte* x, size_t next, const std::byte* const* w, size_t at) {
  _tile_loadd(4, x, kLineBytes);
  _tile_loadd(6, w[0] + at, kLineBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w[1] + at, kLineBytes);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Tall) {
    _tile_loadd(5, x + next, kLineBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  } else {
    _tile_loadd(6, w[2] + at, kLineBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w[3] + at, kLineBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
}

// Prefetches the tiles of weights that are read kWeightsAhead bytes after `at`.
template <size_t Panels>
inline void prefetch_tiles(const std::byte* const* w, size_t at, size_t panel_bytes) {
  const size_t from = ahead_of(at, panel_bytes, Panels);
#pragma GCC unroll 4
  for (size_t i = 0; i < Panels; ++i) {
#pragma GCC unroll 16
    for (size_t line = 0; line < kTileBytes; line += kLineBytes) {
      prefetch_near(w[i] + from + line);
    }
  }
}

// The sums for a block of rows of x and up to four panels, as the unit's tiles store them.
struct TileSums {
  alignas(64) float at[kTileSums][kTileFloats];

  // Sums the products over `steps` * kInputStep inputs. With `from_memory`, prefetches weights.
  template <bool Tall>
  void add(const std::byte* x, size_t next, const std::byte* const* w, size_t steps,
           bool from_memory) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t step = 0; step < steps; ++step) {
      if (from_memory) {
        prefetch_tiles<Tall ? 2 : 4>(w, step * kTileBytes, steps * kTileBytes);
      }
      add_tiles<Tall>(x + step * kTileBytes, next, w, step * kTileBytes);
    }
    _tile_stored(0, at[0], kLineBytes);
    _tile_stored(1, at[1], kLineBytes);
    _tile_stored(2, at[2], kLineBytes);
    _tile_stored(3, at[3], kLineBytes);
  }
  // Returns the product of a row of x and a panel: the sum of the products of the row's two parts.
  Vec of(const Block& block, size_t row, size_t panel) const {
    const size_t part = kParts * row;
    const float* const first =
        at[block.tile_of(part, panel)] + part % kTileRows * kPanelOutputs;
    return load(first) + load(first + kPanelOutputs);
  }
};
static_assert(kLanes == kPanelOutputs);

struct TileCall : ProductCall {
  const std::byte* x_tiles(size_t row, size_t input) const {
    return x + row / kBlockRows * x_block_bytes(shape) + input / kInputStep * kTileBytes;
  }
  // Cuts the rows of x into blocks of at most kTileRows rows, and calls body for each block.
  template <class Body>
  void for_each_block(const Body& body) const {
    for (size_t row = 0; row < rows; row += kTileRows) {
      body(Block{row, rows - row < kTileRows ? rows - row : kTileRows});
    }
  }
};

// Multiplies by `panels` (1 to 4) panels of bfloat16 weights. `configured` is the number of rows
// for which the tiles are configured, or 0. A configuration is slow, because it clears the tiles.
void multiply_bfloat16(const TileCall& call, size_t first, size_t panels, size_t& configured) {
  const size_t steps = call.shape.padded_inputs() / kInputStep;
  const size_t next = x_block_bytes(call.shape);
  call.for_each_block([&](const Block& block) {
    if (block.count != configured) {
      block.configure();
      configured = block.count;
    }
    for (size_t p = 0; p < panels; p += block.panels()) {
      // If there are fewer panels than the tiles allow, the last panel is multiplied again.
      const std::byte* w[kMostPanels];
      for (size_t i = 0; i < block.panels(); ++i) {
        w[i] = call.panel(first + (p + i < panels ? p + i : panels - 1));
      }
      const bool from_memory = block.row == 0;  // later blocks find the weights in the cache
      TileSums sums;
      const std::byte* const x = call.x_tiles(block.row, 0);
      block.tall() ? sums.add<true>(x, next, w, steps, from_memory)
                   : sums.add<false>(x, next, w, steps, from_memory);
      for (size_t row = 0; row < block.count; ++row) {
        for (size_t i = 0; i < block.panels() && p + i < panels; ++i) {
          const Vec sum = sums.of(block, row, i);
          store_panel(call.shape, first + p + i, &sum,
                      call.out + (block.row + row) * call.out_stride);
        }
      }
    }
  });
}

void multiply_tiles(const TileCall& call, size_t first, size_t panels) {
  size_t configured = 0;
  for_panel_runs(first, panels, [&](size_t from, size_t count) {
    multiply_bfloat16(call, from, count, configured);
  });
  _tile_release();
}
