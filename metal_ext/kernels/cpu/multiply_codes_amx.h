// Linear layers of 4 and 8 bits on a matrix unit (Intel's AMX): codes times limbs (bytes of x).

// The number of inputs in a tile of codes. Smaller groups make smaller tiles.
constexpr size_t kCodeStep = 64;

// For many rows, the codes of this many inputs are unpacked together. They fit in a core's cache.
constexpr size_t kSliceInputs = 1024;
// A Unit is one group of one panel. Its sums are scaled kUnitsBehind Units later, because loading
// vectors is slow right after a tile was stored to the same memory.
constexpr size_t kUnitsBehind = 3;
// For few rows, this many unpacked groups are kept: the current one, the next one, and those whose
// sums are not scaled yet. The number is a power of two.
constexpr size_t kGroupsKept = 8;
static_assert(kGroupsKept >= kUnitsBehind + 2);

// Codes of quantized weights (some panels, some groups of inputs), unpacked for the matrix unit.
template <WeightType Type>
class Slice {
 public:
  // Keeps the newest `kept` groups of panels [first, first + panels). `kept` is a power of two.
  Slice(const CodeCall& call, size_t first, size_t panels, size_t kept)
      : shape_(call.shape), start_(call.panel(first)), panels_(panels), kept_(kept) {}

  size_t kept() const { return kept_; }
  size_t panels() const { return panels_; }
  const GroupScales& scales(size_t g, size_t p) const { return scales_[p][place(g)]; }
  const std::byte* codes(size_t g, size_t p) const {
    return kSplit ? split_[p] + place(g) * shape_.group * kPanelOutputs
                  : group(g, p) + shape_.scales_bytes();
  }

  // Unpacks group g of panel p, and prefetches weights that are needed later.
  void read(size_t g, size_t p) {
    const std::byte* const from = group(g, p);
    const size_t end = shape_.group_bytes();
    const std::byte* const ahead =
        start_ + p * shape_.panel_bytes() + ahead_of(g * end, shape_.panel_bytes(), panels_);
    for (size_t line = 0; line < end; line += kLineBytes) {
      prefetch_near(ahead + line);
    }
    scales_[p][place(g)] = scales_at<Type, kMostLimbs>(shape_, from);
    if constexpr (kSplit) {
      std::byte* target = split_[p] + place(g) * shape_.group * kPanelOutputs;
      for (size_t line = shape_.scales_bytes(); line < end; line += kLineBytes) {
        BitVec parts[kCodeParts<Type>];
        read_codes<Type>(from + line, parts);
        __builtin_memcpy(target, parts, sizeof(parts));
        target += 2 * kLineBytes;
      }
      // Without this, compilers might remove the stores, because only a tile load reads the memory.
      asm volatile("" ::: "memory");
    }
  }

 private:
  static constexpr bool kSplit = kCodeParts<Type> > 1;
  static constexpr size_t kSplitBytes = kSplit ? kSliceInputs * kPanelOutputs : kLineBytes;

  size_t place(size_t g) const { return g & (kept_ - 1); }
  const std::byte* group(size_t g, size_t p) const {
    return start_ + p * shape_.panel_bytes() + g * shape_.group_bytes();
  }

  const LinearShape& shape_;
  const std::byte* start_;
  size_t panels_;
  size_t kept_;
  alignas(64) std::byte split_[kMostPanels][kSplitBytes];
  GroupScales scales_[kMostPanels][kSliceInputs / kInputStep];
};

// Sets the sizes of the unit's tiles. Tiles 0 to 2 are sums, 3 to 5 limbs of x, and 6 codes.
void configure_code_tiles(size_t rows, size_t group) {
  const size_t step = group < kCodeStep ? group : kCodeStep;
  TileConfig config;
  for (size_t tile = 0; tile < 7; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : step / 4);
    config.row_bytes[tile] = static_cast<uint16_t>(tile / 3 == 1 ? step : kLineBytes);
  }
  _tile_loadconfig(&config);
}

struct LimbSums {
  alignas(64) int32_t at[kMostLimbs][kTileFloats];
};

inline void load_limbs(const std::byte* x, size_t stride, size_t group) {
  _tile_loadd(3, x, stride);
  _tile_loadd(4, x + group, stride);
  _tile_loadd(5, x + 2 * group, stride);
}

// Multiplies a group's codes by limbs. If a group fits in one tile, the caller loads the limbs.
inline void multiply_limbs(const std::byte* x, size_t stride, size_t group,
                            const std::byte* codes) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (size_t i = 0; i < group; i += kCodeStep) {
    if (group > kCodeStep) {
      load_limbs(x + i, stride, group);
    }
    _tile_loadd(6, codes + i * kPanelOutputs, kLineBytes);
    _tile_dpbsud(0, 3, 6);
    _tile_dpbsud(1, 4, 6);
    _tile_dpbsud(2, 5, 6);
  }
}

inline void store_sums(LimbSums& sums) {
  _tile_stored(0, sums.at[0], kLineBytes);
  _tile_stored(1, sums.at[1], kLineBytes);
  _tile_stored(2, sums.at[2], kLineBytes);
}

// One group of one panel. advance() goes to the next panel, or to the next group's first panel.
struct Unit {
  size_t group;
  size_t panel = 0;
  void advance(size_t panels) {
    if (++panel == panels) {
      panel = 0;
      ++group;
    }
  }
};

// Adds groups [from, to) of a slice's panels to the totals of at most 16 rows [row, row + rows).
// Calls begin(group, panel) before each group of a panel. `totals` is [all rows][kMostPanels].
template <WeightType Type, class Begin>
void add_code_groups(const CodeCall& call, const Slice<Type>& slice, size_t row, size_t rows,
                     size_t from, size_t to, Vec* totals, const Begin& begin) {
  const size_t group = call.shape.group;
  const size_t stride = call.x_stride;
  const size_t panels = slice.panels();
  LimbSums sums[kUnitsBehind + 1];
  Unit behind{from};
  const auto scale = [&](const LimbSums& made) __attribute__((always_inline)) {
    const GroupScales weights = slice.scales(behind.group, behind.panel);
    const auto* x = reinterpret_cast<const std::byte*>(call.factors(row, behind.group));
    Vec* total = totals + row * kMostPanels + behind.panel;
    for (size_t r = 0; r < rows; ++r, total += kMostPanels, x += stride) {
      IntVec limbs[kMostLimbs];
      for (size_t limb = 0; limb < kMostLimbs; ++limb) {
        __builtin_memcpy(&limbs[limb], made.at[limb] + r * kPanelOutputs, sizeof(IntVec));
      }
      *total = add_group<kMostLimbs>(limbs, weights.scale[0], weights.bias[0],
                                      reinterpret_cast<const GroupFactors*>(x), *total);
    }
    behind.advance(panels);
  };
  size_t number = 0;
  for (Unit unit{from}; unit.group < to; unit.advance(panels), ++number) {
    begin(unit.group, unit.panel);
    const std::byte* const limbs = call.limbs(row, unit.group);
    if (unit.panel == 0 && group <= kCodeStep) {
      load_limbs(limbs, stride, group);
    }
    multiply_limbs(limbs, stride, group, slice.codes(unit.group, unit.panel));
    if (number >= kUnitsBehind) {
      scale(sums[(number + 1) % (kUnitsBehind + 1)]);
    }
    store_sums(sums[number % (kUnitsBehind + 1)]);
  }
  for (size_t left = number < kUnitsBehind ? number : kUnitsBehind; left > 0; --left) {
    scale(sums[(number - left) % (kUnitsBehind + 1)]);
  }
}

// Multiplies one block of rows. A group of codes is unpacked while the group before is multiplied.
template <WeightType Type>
void multiply_code_block(const CodeCall& call, size_t first, size_t panels, Vec* totals) {
  const size_t groups = call.shape.groups();
  Slice<Type> slice(call, first, panels, kGroupsKept);
  configure_code_tiles(call.rows, call.shape.group);
  for (size_t p = 0; p < panels; ++p) {
    slice.read(0, p);
  }
  const auto read_next = [&](size_t g, size_t p) {
    if (g + 1 < groups) {
      slice.read(g + 1, p);
    }
  };
  add_code_groups(call, slice, 0, call.rows, 0, groups, totals, read_next);
}

// Multiplies several blocks of rows. Codes are unpacked once for all blocks.
template <WeightType Type>
void multiply_code_blocks(const CodeCall& call, size_t first, size_t panels, Vec* totals) {
  const LinearShape& shape = call.shape;
  Slice<Type> slice(call, first, panels, kSliceInputs / shape.group);
  size_t configured = 0;
  for (size_t from = 0; from < shape.groups(); from += slice.kept()) {
    const size_t left = shape.groups() - from;
    const size_t to = from + (left < slice.kept() ? left : slice.kept());
    for (size_t g = from; g < to; ++g) {
      for (size_t p = 0; p < panels; ++p) {
        slice.read(g, p);
      }
    }
    for (size_t row = 0; row < call.rows; row += kTileRows) {
      const size_t rows = call.rows - row < kTileRows ? call.rows - row : kTileRows;
      if (rows != configured) {
        configure_code_tiles(rows, shape.group);
        configured = rows;
      }
      add_code_groups(call, slice, row, rows, from, to, totals, [](size_t, size_t) {});
    }
  }
}

// Multiplies all rows of x by the panels [first, first + panels), at most four.
template <WeightType Type>
void multiply_code_tiles(const CodeCall& call, size_t first, size_t panels) {
  Vec totals[kMaxRows * kMostPanels];
  for (size_t i = 0; i < call.rows * kMostPanels; ++i) {
    totals[i] = Vec{};
  }
  call.rows <= kTileRows ? multiply_code_block<Type>(call, first, panels, totals)
                         : multiply_code_blocks<Type>(call, first, panels, totals);
  for (size_t row = 0; row < call.rows; ++row) {
    for (size_t p = 0; p < panels; ++p) {
      store_panel(call.shape, first + p, totals + row * kMostPanels + p,
                  call.out + row * call.out_stride);
    }
  }
}
