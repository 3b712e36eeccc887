// Attention of one row over a split (part) of its keys, for tokens that are being generated.

// In long sequences, reads from memory take most of the time. All heads of a few rows are read
// before the next rows, so that memory is read in one direction. Cache lines are prefetched
// kFetchTokens ahead, a few at a time, because many at once would stall the arithmetic.
constexpr size_t kScoreStep = 8;  // tokens
constexpr size_t kValueStep = 4;
constexpr size_t kFetchTokens = 16;
constexpr size_t kLineBytes = 64;

// The number of tokens that are scored together for H query heads, to fill one vector of scores.
template <size_t H>
constexpr size_t kScoreRun = kLanes / H;

// Computes the scores of at most kScoreRun<H> tokens for H query heads that share a KV head.
template <class KV, size_t D, size_t H>
inline void score_tokens(
    const float* queries, const KV* keys, size_t stride, size_t tokens, float* scores) {
  constexpr size_t kVecs = D / kLanes;
  constexpr size_t T = kScoreRun<H>;
  constexpr bool kHeld = H * kVecs <= kSumRegisters;  // whether the queries fit into registers
  Vec held[kHeld ? H * kVecs : 1];
  for (size_t v = 0; kHeld && v < H * kVecs; ++v) {
    held[v] = load(queries + v * kLanes);
  }
  const auto query = [&](size_t h, size_t v) {
    return kHeld ? held[h * kVecs + v] : load(queries + h * D + v * kLanes);
  };
  Vec parts[kLanes];
  for (size_t t = 0; t < T; ++t) {
    Vec dot[H] = {};
    if (t < tokens) {
      const KV* row = keys + t * stride;
      for (size_t v = 0; v < kVecs; v += 2) {
        Vec k0, k1;
        load_pair(row + v * kLanes, k0, k1);
        for (size_t h = 0; h < H; ++h) {
          dot[h] = fma(query(h, v), k0, dot[h]);
          dot[h] = fma(query(h, v + 1), k1, dot[h]);
        }
      }
    }
    for (size_t h = 0; h < H; ++h) {
      parts[h * T + t] = dot[h];
    }
  }
  float totals[kLanes];
  store(totals, sums(parts));
  for (size_t h = 0; h < H; ++h) {
    for (size_t t = 0; t < T && t < tokens; ++t) {
      scores[h * kTileTokens + t] = totals[h * T + t];
    }
  }
}

// Sets values[h] to values[h] * factors[h] + (sum over t of weights[h][t] * rows[t]), for H heads.
template <class KV, size_t D, size_t H>
inline void add_values(
    const float* weights, const float* factors, const KV* rows, size_t stride, size_t tokens,
    float* values) {
  constexpr size_t kVecs = D / kLanes;
  constexpr size_t kSlab = kSumRegisters / H < kVecs ? kSumRegisters / H : kVecs;
  static_assert(kSlab % 2 == 0 && kVecs % kSlab == 0);
  for (size_t slab = 0; slab < kVecs; slab += kSlab) {
    const size_t first = slab * kLanes;
    Vec sum[H][kSlab];
    for (size_t h = 0; h < H; ++h) {
      for (size_t v = 0; v < kSlab; ++v) {
        sum[h][v] = load(values + h * D + first + v * kLanes) * all(factors[h]);
      }
    }
    for (size_t t = 0; t < tokens; ++t) {
      const KV* row = rows + t * stride + first;
      for (size_t v = 0; v < kSlab; v += 2) {
        Vec v0, v1;
        load_pair(row + v * kLanes, v0, v1);
        for (size_t h = 0; h < H; ++h) {
          const Vec w = all(weights[h * kTileTokens + t]);
          sum[h][v] = fma(w, v0, sum[h][v]);
          sum[h][v + 1] = fma(w, v1, sum[h][v + 1]);
        }
      }
    }
    for (size_t h = 0; h < H; ++h) {
      for (size_t v = 0; v < kSlab; ++v) {
        store(values + h * D + first + v * kLanes, sum[h][v]);
      }
    }
  }
}

// Cuts `group` heads into runs of 4, 2 or 1 heads. Calls body(first head, constant H) for each run.
template <class Body>
inline void for_head_runs(size_t group, const Body& body) {
  size_t head = 0;
  for (; head + 4 <= group; head += 4) {
    body(head, std::integral_constant<size_t, 4>{});
  }
  if (head + 2 <= group) {
    body(head, std::integral_constant<size_t, 2>{});
    head += 2;
  }
  if (head < group) {
    body(head, std::integral_constant<size_t, 1>{});
  }
}

// Prefetches one KV head's part of `tokens` rows, beginning kFetchTokens rows after `head`.
template <class KV, size_t D>
inline void fetch_ahead(const KV* head, size_t stride, size_t tokens) {
  for (size_t t = 0; t < tokens; ++t) {
    const auto* part = reinterpret_cast<const char*>(head + (kFetchTokens + t) * stride);
    for (size_t byte = 0; byte < D * sizeof(KV); byte += kLineBytes) {
      prefetch(part + byte);
    }
  }
}

// Adds the attention over a tile's tokens [skip, tokens) to `out`, for KV heads and their
// query heads.
template <class KV, size_t D>
void attend_tile(
    const HeadShape& shape, float softcap, const HeadRun& kv_heads, const float* prepared,
    const KV* keys, const KV* values, size_t skip, size_t tokens, float* scores, Partial& out) {
  const size_t stride = shape.row_elements();
  const size_t group = shape.group();
  for (size_t t = skip; t < tokens; t += kScoreStep) {
    const size_t n = tokens - t < kScoreStep ? tokens - t : kScoreStep;
    for (size_t kv_head = kv_heads.first; kv_head < kv_heads.end(); ++kv_head) {
      const KV* rows = keys + t * stride;
      fetch_ahead<KV, D>(rows + kv_head * D, stride, n);
      for_head_runs(group, [&](size_t run, auto heads) {
        constexpr size_t H = decltype(heads)::value;
        const size_t head = kv_head * group + run;
        for (size_t i = 0; i < n; i += kScoreRun<H>) {
          score_tokens<KV, D, H>(
              prepared + head * D, rows + i * stride + kv_head * D, stride, n - i,
              scores + head * kTileTokens + t + i);
        }
      });
    }
  }
  float factors[kMaxQueryHeads];
  for (size_t head = kv_heads.first * group; head < kv_heads.end() * group; ++head) {
    factors[head] = soften(scores + head * kTileTokens, skip, tokens, softcap, out.highest[head],
                           out.weight[head]);
  }
  for (size_t t = skip; t < tokens; t += kValueStep) {
    const size_t n = tokens - t < kValueStep ? tokens - t : kValueStep;
    for (size_t kv_head = kv_heads.first; kv_head < kv_heads.end(); ++kv_head) {
      const KV* rows = values + t * stride;
      fetch_ahead<KV, D>(rows + kv_head * D, stride, n);
      for_head_runs(group, [&](size_t run, auto heads) {
        const size_t head = kv_head * group + run;
        add_values<KV, D, decltype(heads)::value>(
            scores + head * kTileTokens + t, factors + head, rows + kv_head * D, stride, n,
            out.values + head * D);
      });
    }
    for (size_t head = kv_heads.first * group; head < kv_heads.end() * group; ++head) {
      factors[head] = 1.0f;  // earlier values are scaled once per tile
    }
  }
}

void attend_split(
    const HeadShape& shape, float softcap, const HeadRun& kv_heads, const float* prepared,
    const void* keys, const void* values, size_t skip, size_t tokens, Partial out) {
  float scores[kMaxQueryHeads * kTileTokens];
  const size_t first = kv_heads.first * shape.group();
  Partial own{out.highest + first, out.weight + first, out.values + first * shape.head_dim};
  start(own, kv_heads.count * shape.group(), shape.head_dim);
  with_type(shape.type, [&]<class KV>(KV) {
    for_head_dim(shape.head_dim, [&](auto dim) {
      constexpr size_t D = decltype(dim)::value;
      const size_t stride = shape.row_elements();
      for (size_t t = skip / kTileTokens * kTileTokens; t < tokens; t += kTileTokens) {
        const size_t n = tokens - t < kTileTokens ? tokens - t : kTileTokens;
        attend_tile<KV, D>(
            shape, softcap, kv_heads, prepared, static_cast<const KV*>(keys) + t * stride,
            static_cast<const KV*>(values) + t * stride, skip > t ? skip - t : 0, n, scores, out);
      }
    });
  });
}
