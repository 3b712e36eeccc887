// Many rows of one sequence: prefill. A tile of K and V is widened once for all of them. Included
// inside an instruction set's namespace, as simd.h is.

// Widens a tile of one head to fp32 [tokens][D], in kernel order.
template <class KV, size_t D>
inline void widen(const KV* rows, size_t stride, size_t tokens, float* tile) {
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t i = 0; i < D; i += 2 * kLanes) {
      Vec v0, v1;
      load_pair(rows + t * stride + i, v0, v1);
      store(tile + t * D + i, v0);
      store(tile + t * D + i + kLanes, v1);
    }
  }
}

// Scores are made in blocks of kScoreRows query rows and kScoreTokens keys.
constexpr size_t kScoreTokens = 4;
constexpr size_t kScoreRows = kSumRegisters / kScoreTokens;

// Summed as score_tokens sums: along the row with kLanes sums at once, then by halving.
template <size_t D>
inline void score_block(const float* const* rows, const float* keys, float* const* scores) {
  Vec dots[kSumRegisters] = {};
  for (size_t i = 0; i < D; i += kLanes) {
    for (size_t t = 0; t < kScoreTokens; ++t) {
      const Vec key = load(keys + t * D + i);
      for (size_t r = 0; r < kScoreRows; ++r) {
        dots[r * kScoreTokens + t] = fma(load(rows[r] + i), key, dots[r * kScoreTokens + t]);
      }
    }
  }
  float totals[kSumRegisters];
  for (size_t d = 0; d < kSumRegisters; d += kLanes) {
    store(totals + d, sums(dots + d));
  }
  for (size_t r = 0; r < kScoreRows; ++r) {
    for (size_t t = 0; t < kScoreTokens; ++t) {
      scores[r][t] = totals[r * kScoreTokens + t];
    }
  }
}

// values[r] = values[r] * factors[r] + sum over tokens [from, to) of weights[r][t] * tile[t].
template <size_t D, size_t R>
inline void add_tile(
    float* const* weights, const float* factors, const float* tile, size_t from, size_t to,
    float* const* values) {
  constexpr size_t kVecs = D / kLanes;
  constexpr size_t kSlab = kSumRegisters / 2 < kVecs ? kSumRegisters / 2 : kVecs;
  static_assert(kVecs % kSlab == 0);
  for (size_t first = 0; first < D; first += kSlab * kLanes) {
    Vec sum[R][kSlab];
    for (size_t r = 0; r < R; ++r) {
      for (size_t v = 0; v < kSlab; ++v) {
        sum[r][v] = load(values[r] + first + v * kLanes) * all(factors[r]);
      }
    }
    for (size_t t = from; t < to; ++t) {
      for (size_t v = 0; v < kSlab; ++v) {
        const Vec value = load(tile + t * D + first + v * kLanes);
        for (size_t r = 0; r < R; ++r) {
          sum[r][v] = fma(all(weights[r][t]), value, sum[r][v]);
        }
      }
    }
    for (size_t r = 0; r < R; ++r) {
      for (size_t v = 0; v < kSlab; ++v) {
        store(values[r] + first + v * kLanes, sum[r][v]);
      }
    }
  }
}

// The query rows of a chunk that share a KV head, and where their results gather. Row i stands at
// position `position + i / group` and is query head `i % group` of the KV head.
struct Chunk {
  const HeadShape& shape;
  const float* prepared;
  size_t position;
  size_t rows;
  float* keys;    // [kTileTokens][head_dim] widened
  float* values;  // same
  float* scores;  // [rows][kTileTokens]
  Partial split;  // of the split that is being gathered
  Partial total;  // of the splits before it

  const float* queries(size_t i) const {
    return prepared + i / shape.group() * shape.query_floats() +
           i % shape.group() * shape.head_dim;
  }
  // Keys of a tile that starts at `token` which row i may see; the first rows may see none.
  size_t visible(size_t i, size_t token, size_t tokens) const {
    const size_t end = position + i / shape.group() + 1;
    return end <= token ? 0 : (end - token < tokens ? end - token : tokens);
  }
};

template <size_t D>
void score_tile(const Chunk& chunk, size_t first_row, size_t tokens) {
  for (size_t row = first_row; row < chunk.rows; row += kScoreRows) {
    const float* rows[kScoreRows];
    float* scores[kScoreRows];
    float spare[kTileTokens];
    for (size_t r = 0; r < kScoreRows; ++r) {
      const bool real = row + r < chunk.rows;
      rows[r] = chunk.queries(real ? row + r : row);
      scores[r] = real ? chunk.scores + (row + r) * kTileTokens : spare;
    }
    for (size_t t = 0; t < tokens; t += kScoreTokens) {
      score_block<D>(rows, chunk.keys + t * D, scores);
      for (size_t r = 0; r < kScoreRows; ++r) {
        scores[r] += kScoreTokens;
      }
    }
  }
}

// Softens and adds rows i and, where there is one, i + 1.
template <size_t D>
void gather_rows(const Chunk& chunk, size_t i, size_t token, size_t tokens) {
  float* weights[2];
  float* values[2];
  float factors[2];
  size_t seen[2] = {0, 0};
  const size_t count = i + 1 < chunk.rows ? 2 : 1;
  for (size_t r = 0; r < count; ++r) {
    weights[r] = chunk.scores + (i + r) * kTileTokens;
    values[r] = chunk.split.values + (i + r) * D;
    seen[r] = chunk.visible(i + r, token, tokens);
    factors[r] = soften(weights[r], seen[r], chunk.split.highest[i + r], chunk.split.weight[i + r]);
  }
  if (count == 1) {
    add_tile<D, 1>(weights, factors, chunk.values, 0, seen[0], values);
    return;
  }
  // Row i sees no more than row i + 1.
  add_tile<D, 2>(weights, factors, chunk.values, 0, seen[0], values);
  if (seen[1] > seen[0]) {
    const float once = 1.0f;
    add_tile<D, 1>(weights + 1, &once, chunk.values, seen[0], seen[1], values + 1);
  }
}

template <class KV, size_t D>
void gather_tile(Chunk& chunk, const KV* keys, const KV* values, size_t token, size_t tokens) {
  const size_t stride = chunk.shape.row_elements();
  widen<KV, D>(keys + token * stride, stride, tokens, chunk.keys);
  widen<KV, D>(values + token * stride, stride, tokens, chunk.values);
  for (size_t t = tokens; t % kScoreTokens != 0; ++t) {
    for (size_t i = 0; i < D; ++i) {
      chunk.keys[t * D + i] = 0.0f;
    }
  }
  const size_t first_position = token > chunk.position ? token - chunk.position : 0;
  const size_t first_row = first_position * chunk.shape.group();
  score_tile<D>(chunk, first_row, tokens);
  for (size_t i = first_row; i < chunk.rows; i += 2) {
    gather_rows<D>(chunk, i, token, tokens);
  }
}

void attend_chunk(
    const HeadShape& shape, size_t kv_head, const float* prepared, const void* keys,
    const void* values, size_t rows, size_t position, float* out, float* scratch) {
  const size_t heads = rows * shape.group();
  const size_t tile = kTileTokens * shape.head_dim;
  float* const scores = scratch + 2 * tile;
  float* const split = scores + heads * kTileTokens;
  float* const total = split + Partial::floats(heads, shape.head_dim);
  Chunk chunk{shape, prepared, position, heads, scratch, scratch + tile, scores,
              Partial::at(split, heads), Partial::at(total, heads)};
  start(chunk.total, heads, shape.head_dim);
  const size_t end = position + rows;
  with_type(shape.type, [&]<class KV>(KV) {
    for_head_dim(shape.head_dim, [&](auto dim) {
      constexpr size_t D = decltype(dim)::value;
      const KV* head_keys = static_cast<const KV*>(keys) + kv_head * D;
      const KV* head_values = static_cast<const KV*>(values) + kv_head * D;
      for (size_t from = 0; from < end; from += kSplitTokens) {
        const size_t to = end - from < kSplitTokens ? end : from + kSplitTokens;
        start(chunk.split, heads, D);
        for (size_t t = from; t < to; t += kTileTokens) {
          const size_t n = to - t < kTileTokens ? to - t : kTileTokens;
          gather_tile<KV, D>(chunk, head_keys, head_values, t, n);
        }
        for (size_t i = 0; i < heads; ++i) {
          if (chunk.visible(i, from, kSplitTokens) > 0) {
            join(chunk.total.highest[i], chunk.total.weight[i], chunk.total.values + i * D,
                 chunk.split.highest[i], chunk.split.weight[i], chunk.split.values + i * D, D);
          }
        }
      }
    });
  });
  for (size_t i = 0; i < heads; ++i) {
    float* target = out + i / shape.group() * shape.query_floats() +
                    i % shape.group() * shape.head_dim;
    divide(shape.type, chunk.total.values + i * shape.head_dim, chunk.total.weight[i],
           shape.head_dim, target);
  }
}
