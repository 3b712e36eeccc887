// Attention of many rows of one sequence, for chunks of prompts. Each lane of a vector of scores is
// a query row, so that sums never cross lanes. All rows share the reads of K and V.

// score_tile() scores this many vectors of query rows together.
constexpr size_t kRowVecs = kLanes < 8 ? 4 : 2;
// The number of rows in one add_slab(): fewer without AVX, where a broadcast is two instructions.
constexpr size_t kAddRows = kLanes < 8 && kSumRegisters < 16 ? 2 : 4;

// Converts K or V of some tokens to float32 [D / W][kTileTokens][W], in kernel order (simd.h).
template <class KV, size_t D, size_t W>
inline void widen(const KV* rows, size_t stride, size_t tokens, float* tile) {
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t i = 0; i < D; i += 2 * kLanes) {
      Vec v[2];
      load_pair(rows + t * stride + i, v[0], v[1]);
      for (size_t j = 0; j < 2; ++j) {
        const size_t at = i + j * kLanes;
        store(tile + at / W * W * kTileTokens + t * W + at % W, v[j]);
      }
    }
  }
}

// Transposes a matrix of kLanes vectors: lane i of vector j becomes lane j of vector i.
template <size_t step = 1>
inline void transpose(Vec* v) {
  if constexpr (step < kLanes) {
    Vec zipped[kLanes];
    for (size_t i = 0; i < kLanes / 2; ++i) {
      zipped[2 * i] = zip<false>(v[i], v[i + kLanes / 2], Lanes{});
      zipped[2 * i + 1] = zip<true>(v[i], v[i + kLanes / 2], Lanes{});
    }
    transpose<2 * step>(zipped);
    for (size_t i = 0; i < kLanes; ++i) {
      v[i] = zipped[i];
    }
  }
}

// Computes a part of the scores of T tokens: the sum of query times key over every kLanes-th
// dimension. Then pops `taken` parts from the stack that ends at `top`, adds them, and pushes the
// sum. This function is not inlined, to keep the sums in registers.
template <size_t D, size_t V, size_t T, size_t taken>
__attribute__((noinline)) void multiply_lane(const float* queries, const float* keys, float* top) {
  Vec sum[T][V] = {};
#pragma GCC unroll 2
  for (size_t i = 0; i < D; i += kLanes) {
    for (size_t t = 0; t < T; ++t) {
      const Vec key = all(keys[t * D + i]);
      for (size_t v = 0; v < V; ++v) {
        sum[t][v] = fma(load(queries + i * V + v * kLanes), key, sum[t][v]);
      }
    }
  }
  for (size_t n = 0; n < taken; ++n) {
    top -= T * V * kLanes;
    for (size_t t = 0; t < T; ++t) {
      for (size_t v = 0; v < V; ++v) {
        sum[t][v] = load(top + (t * V + v) * kLanes) + sum[t][v];
      }
    }
  }
  for (size_t t = 0; t < T; ++t) {
    for (size_t v = 0; v < V; ++v) {
      store(top + (t * V + v) * kLanes, sum[t][v]);
    }
  }
}

// Adds the parts of multiply_lane() for dimensions `first`, `first` + `step`, ... as a binary tree.
template <size_t D, size_t V, size_t T, size_t step = 1, size_t taken = 0>
inline void multiply_lanes(const float* queries, const float* keys, size_t first, float* top) {
  if constexpr (step == kLanes) {
    multiply_lane<D, V, T, taken>(queries + first * D * V, keys + first, top);
  } else {
    multiply_lanes<D, V, T, 2 * step>(queries, keys, first, top);
    multiply_lanes<D, V, T, 2 * step, taken + 1>(
        queries, keys, first + step, top + T * V * kLanes);
  }
}

// Computes the scores [V][kTileTokens][kLanes] of queries [kLanes][D / kLanes][V][kLanes] and keys.
template <size_t D, size_t V>
void score_rows(const float* queries, const float* keys, size_t tokens, float* scores) {
  constexpr size_t T = kSumRegisters / V;
  constexpr size_t kMostWaiting = 5;  // waiting sums: one per halving of 16 lanes, and one more
  for (size_t t = 0; t < tokens; t += T) {
    float waiting[kMostWaiting * T * V * kLanes];
    multiply_lanes<D, V, T>(queries, keys + t * D, 0, waiting);
    for (size_t i = 0; i < T; ++i) {
      for (size_t v = 0; v < V; ++v) {
        store(scores + (v * kTileTokens + t + i) * kLanes, load(waiting + (i * V + v) * kLanes));
      }
    }
  }
}

// Returns for each row (lane) the sum of the weights of tokens `first`, `first` + `step`, ... The
// order of the additions is that of sum_of().
template <size_t step = 1>
inline Vec sum_tokens(const float* weights, size_t first, size_t tokens) {
  if constexpr (step == kLanes) {
    Vec sum{};
    for (size_t t = first; t < tokens; t += kLanes) {
      sum += load(weights + t * kLanes);
    }
    return sum;
  } else {
    return sum_tokens<2 * step>(weights, first, tokens) +
           sum_tokens<2 * step>(weights, first + step, tokens);
  }
}

// Does one step of the softmax, as soften() does, for kLanes rows at once.
inline void soften_rows(
    float* scores, size_t tokens, float* highest, float* weight, float* factors) {
  constexpr size_t kChains = 4;
  Vec best[kChains];
  for (size_t i = 0; i < kChains; ++i) {
    best[i] = load(highest);
  }
  size_t t = 0;
  for (; t + kChains <= tokens; t += kChains) {
    for (size_t i = 0; i < kChains; ++i) {
      best[i] = larger(load(scores + (t + i) * kLanes), best[i]);
    }
  }
  for (; t < tokens; ++t) {
    best[0] = larger(load(scores + t * kLanes), best[0]);
  }
  const Vec raised = larger(larger(best[0], best[1]), larger(best[2], best[3]));
  for (size_t t = 0; t < tokens; ++t) {
    store(scores + t * kLanes, exp_of_negative(load(scores + t * kLanes) - raised));
  }
  const Vec total = sum_tokens(scores, 0, tokens);
  const Vec factor = exp_of_negative(load(highest) - raised);
  store(weight, load(weight) * factor + total);
  store(highest, raised);
  store(factors, factor);
}

// Sets values[r] to values[r] * factors[r] + (sum over tokens t in [from, to) of weights[t][r] *
// tile[t]), for R rows of S vectors each.
template <size_t D, size_t R, size_t S>
__attribute__((noinline)) void add_slab(
    const float* weights, const float* factors, const float* tile, size_t from, size_t to,
    float* values) {
  Vec sum[R][S];
  for (size_t r = 0; r < R; ++r) {
    for (size_t v = 0; v < S; ++v) {
      sum[r][v] = load(values + r * D + v * kLanes) * all(factors[r]);
    }
  }
  for (size_t t = from; t < to; ++t) {
    Vec value[S];
    for (size_t v = 0; v < S; ++v) {
      value[v] = load(tile + (t * S + v) * kLanes);
    }
    for (size_t r = 0; r < R; ++r) {
      const Vec weight = all(weights[t * kLanes + r]);
      for (size_t v = 0; v < S; ++v) {
        sum[r][v] = fma(weight, value[v], sum[r][v]);
      }
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t v = 0; v < S; ++v) {
      store(values + r * D + v * kLanes, sum[r][v]);
    }
  }
}

// Query rows of tokens for one KV head, and intermediate results. If n query heads share the KV
// head, row i is head i % n of the token at `position` + i / n. Extra rows fill up the last vector.
struct Chunk {
  const HeadShape& shape;
  const Softmax& softmax;
  size_t position;
  size_t rows;
  float* keys;     // [kKeyTokens][head_dim], converted
  float* values;   // [kTileTokens][kValueDims], converted
  float* queries;  // [rows][head_dim], as score_rows reads them
  float* scores;   // [rows / kLanes][kTileTokens][kLanes]
  float* factors;  // [rows]
  Partial split;   // the result over the current split of the keys
  Partial total;   // the joined results over earlier splits

  // Returns how many of the `tokens` keys from `token` on are not behind row i.
  size_t visible(size_t i, size_t token, size_t tokens) const {
    if (token + tokens <= position + 1) {
      return tokens;
    }
    const size_t end = position + i / shape.group() + 1;
    return end <= token ? 0 : (end - token < tokens ? end - token : tokens);
  }

  // Returns how many of the `tokens` keys from `token` on are before the window of row i.
  size_t hidden(size_t i, size_t token, size_t tokens) const {
    const size_t first = softmax.first_seen(position + i / shape.group());
    return first <= token ? 0 : (first - token < tokens ? first - token : tokens);
  }
};

// Cuts the rows into blocks of V * kLanes rows. Calls body(first row, constant V) for each block.
template <class Body>
inline void for_row_blocks(size_t rows, const Body& body) {
  size_t row = 0;
  for (; row + kRowVecs * kLanes <= rows; row += kRowVecs * kLanes) {
    body(row, std::integral_constant<size_t, kRowVecs>{});
  }
  for (; row < rows; row += kLanes) {
    body(row, std::integral_constant<size_t, 1>{});
  }
}

// Copies `count` query rows to chunk.queries, laid out for score_rows(). Row 0 fills the rest.
template <size_t D>
void turn_queries(const Chunk& chunk, const float* prepared, size_t count) {
  const size_t group = chunk.shape.group();
  for_row_blocks(chunk.rows, [&](size_t first, auto vecs) {
    constexpr size_t V = decltype(vecs)::value;
    for (size_t v = 0; v < V; ++v) {
      const float* rows[kLanes];
      for (size_t r = 0; r < kLanes; ++r) {
        const size_t i = first + v * kLanes + r < count ? first + v * kLanes + r : 0;
        rows[r] = prepared + i / group * chunk.shape.query_floats() + i % group * D;
      }
      for (size_t i = 0; i < D; i += kLanes) {
        Vec turned[kLanes];
        for (size_t r = 0; r < kLanes; ++r) {
          turned[r] = load(rows[r] + i);
        }
        transpose(turned);
        for (size_t lane = 0; lane < kLanes; ++lane) {
          store(chunk.queries + first * D + (lane * D + i) * V + v * kLanes, turned[lane]);
        }
      }
    }
  });
}

template <class KV, size_t D>
void score_tile(const Chunk& chunk, const KV* keys, size_t token, size_t tokens) {
  const size_t stride = chunk.shape.row_elements();
  const size_t skip = chunk.hidden(0, token, tokens);
  for (size_t t = skip / kKeyTokens * kKeyTokens; t < tokens; t += kKeyTokens) {
    const size_t n = tokens - t < kKeyTokens ? tokens - t : kKeyTokens;
    const size_t from = skip > t ? skip - t : 0;  // scores before it are of no keys, and not used
    widen<KV, D, D>(keys + (token + t + from) * stride, stride, n - from, chunk.keys + from * D);
    for_row_blocks(chunk.rows, [&](size_t row, auto vecs) {
      constexpr size_t V = decltype(vecs)::value;
      const size_t most = chunk.visible(row + V * kLanes - 1, token + t, n);
      score_rows<D, V>(
          chunk.queries + row * D, chunk.keys, most, chunk.scores + row * kTileTokens + t * kLanes);
    });
  }
}

// Calls soften_rows() for kLanes rows. Keys that a row does not see get the weight 0.
void soften_tile(const Chunk& chunk, size_t row, size_t token, size_t tokens) {
  float* const scores = chunk.scores + row * kTileTokens;
  const size_t most = chunk.visible(row + kLanes - 1, token, tokens);
  const size_t least = chunk.visible(row, token, tokens);
  const size_t skip = chunk.hidden(row + kLanes - 1, token, tokens);
  cap_scores(scores, most * kLanes, chunk.softmax.softcap);
  if (least < most || skip > 0) {
    IntVec first, seen;
    for (size_t r = 0; r < kLanes; ++r) {
      first[r] = static_cast<int32_t>(chunk.hidden(row + r, token, tokens));
      seen[r] = static_cast<int32_t>(chunk.visible(row + r, token, tokens));
    }
    const auto hide = [&](size_t from, size_t to) {
      for (size_t t = from; t < to; ++t) {
        const IntVec here = static_cast<int32_t>(t) - IntVec{};
        const Vec score = load(scores + t * kLanes);
        store(scores + t * kLanes, ((seen > here) & (first <= here)) ? score : all(kHidden));
      }
    };
    hide(0, skip);
    hide(least, most);
  }
  soften_rows(scores, most, chunk.split.highest + row, chunk.split.weight + row,
              chunk.factors + row);
}

template <class KV, size_t D>
void add_tile(const Chunk& chunk, const KV* values, size_t token, size_t tokens) {
  const size_t skip = chunk.hidden(0, token, tokens);
  constexpr size_t W = D < kValueDims ? D : kValueDims;
  constexpr size_t kMost = kSumRegisters / kAddRows * kLanes;
  constexpr size_t kSlab = kMost < W ? kMost : W;
  constexpr size_t S = kSlab / kLanes;
  const size_t stride = chunk.shape.row_elements();
  for (size_t i = 0; i < D; i += kSlab) {
    if (i % W == 0) {
      widen<KV, W, kSlab>(values + (token + skip) * stride + i, stride, tokens - skip,
                          chunk.values + skip * kSlab);
    }
    const float* const tile = chunk.values + i % W * kTileTokens;
    for (size_t row = 0; row < chunk.rows; row += kAddRows) {
      const float* const weights =
          chunk.scores + row / kLanes * kLanes * kTileTokens + row % kLanes;
      float* const into = chunk.split.values + row * D + i;
      const size_t least = chunk.visible(row, token, tokens);
      const size_t from = chunk.hidden(row, token, tokens);
      if (chunk.hidden(row + kAddRows - 1, token, tokens) > from) {
        for (size_t r = 0; r < kAddRows; ++r) {
          add_slab<D, 1, S>(weights + r, chunk.factors + row + r, tile,
                            chunk.hidden(row + r, token, tokens),
                            chunk.visible(row + r, token, tokens), into + r * D);
        }
        continue;
      }
      add_slab<D, kAddRows, S>(weights, chunk.factors + row, tile, from, least, into);
      if (chunk.visible(row + kAddRows - 1, token, tokens) > least) {
        const float once = 1.0f;
        for (size_t r = 1; r < kAddRows; ++r) {
          const size_t seen = chunk.visible(row + r, token, tokens);
          add_slab<D, 1, S>(weights + r, &once, tile, least, seen, into + r * D);
        }
      }
    }
  }
}

template <class KV, size_t D>
void gather_split(const Chunk& chunk, const KV* keys, const KV* values, size_t from, size_t to) {
  const size_t skip = chunk.hidden(0, from, to - from);
  for (size_t t = from + skip / kTileTokens * kTileTokens; t < to; t += kTileTokens) {
    const size_t n = to - t < kTileTokens ? to - t : kTileTokens;
    score_tile<KV, D>(chunk, keys, t, n);
    for (size_t row = 0; row < chunk.rows; row += kLanes) {
      soften_tile(chunk, row, t, n);
    }
    add_tile<KV, D>(chunk, values, t, n);
  }
}

void attend_chunk(
    const HeadShape& shape, const Softmax& softmax, size_t kv_head, const float* prepared,
    const void* keys, const void* values, size_t rows, size_t position, float* out,
    float* scratch) {
  const size_t count = rows * shape.group();
  const size_t heads = (count + kLanes - 1) / kLanes * kLanes;
  const auto take = [&](size_t floats) {
    float* const taken = scratch;
    scratch += floats;
    return taken;
  };
  Chunk chunk{
      shape, softmax, position, heads, take(kKeyTokens * shape.head_dim),
      take(kTileTokens * kValueDims), take(heads * shape.head_dim), take(heads * kTileTokens),
      take(heads),
      Partial::at(take(Partial::floats(heads, shape.head_dim)), heads),
      Partial::at(take(Partial::floats(heads, shape.head_dim)), heads)};
  start(chunk.total, heads, shape.head_dim);
  const size_t end = position + rows;
  with_type(shape.type, [&]<class KV>(KV) {
    for_head_dim(shape.head_dim, [&](auto dim) {
      constexpr size_t D = decltype(dim)::value;
      turn_queries<D>(chunk, prepared, count);
      const size_t first = softmax.first_seen(position);
      for (size_t from = first / kSplitTokens * kSplitTokens; from < end; from += kSplitTokens) {
        const size_t to = end - from < kSplitTokens ? end : from + kSplitTokens;
        start(chunk.split, heads, D);
        gather_split<KV, D>(
            chunk, static_cast<const KV*>(keys) + kv_head * D,
            static_cast<const KV*>(values) + kv_head * D, from, to);
        for (size_t i = 0; i < count; ++i) {
          if (chunk.visible(i, from, kSplitTokens) > chunk.hidden(i, from, kSplitTokens)) {
            join(chunk.total.highest[i], chunk.total.weight[i], chunk.total.values + i * D,
                 chunk.split.highest[i], chunk.split.weight[i], chunk.split.values + i * D, D);
          }
        }
      }
    });
  });
  for (size_t i = 0; i < count; ++i) {
    float* target = out + i / shape.group() * shape.query_floats() +
                    i % shape.group() * shape.head_dim;
    const float weight = with_sink(softmax.sinks, kv_head * shape.group() + i % shape.group(),
                                   chunk.total.highest[i], chunk.total.weight[i]);
    divide(shape.type, chunk.total.values + i * shape.head_dim, weight, shape.head_dim, target);
  }
}
