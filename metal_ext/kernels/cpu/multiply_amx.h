// Linear layers of bfloat16 on a matrix unit. Included inside an instruction set's namespace, as
// simd.h is.

// Panels [first, first + 1 to 4) of bfloat16 weights. configured: rows that the tiles are as high
// as, or none; loading how high they are empties the unit.
void multiply_bfloat16(const TileCall& call, size_t first, size_t panels, size_t& configured) {
  const size_t steps = call.shape.padded_inputs() / kInputStep;
  const size_t next = x_block_bytes(call.shape);
  call.for_each_block([&](const Block& block) {
    if (block.count != configured) {
      block.configure();
      configured = block.count;
    }
    for (size_t p = 0; p < panels; p += block.panels()) {
      // Where a panel is missing, the last one stands in for it.
      const std::byte* w[kMostPanels];
      for (size_t i = 0; i < block.panels(); ++i) {
        w[i] = call.panel(first + (p + i < panels ? p + i : panels - 1));
      }
      const bool from_memory = block.row == 0;  // later blocks find them in the cache
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
