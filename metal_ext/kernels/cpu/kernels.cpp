#include "cpu/kernels.h"

#include <utility>

#include "cpu/head_dims.h"

// Compiled once per instruction set, with QUIRE_ISA naming it and QUIRE_LANES its floats per
// vector. Nothing from the standard library that is a function may be called here: the linker
// keeps one copy of an inline function, and it must not be one that needs AVX-512.
namespace quire::cpu::QUIRE_ISA {
namespace {

#include "cpu/simd.h"

// Registers that may hold sums: half of them on machines with 32.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr size_t kSumRegisters = 16;
#else
constexpr size_t kSumRegisters = 8;
#endif

constexpr float kNoScore = -1e30f;  // below every score; finite, so that differences stay numbers

// Reading K and V of a long sequence is bound by memory. All heads of a few rows are read before
// the next rows are, so that memory is read in one direction; and lines that will be read
// kFetchTokens later are asked for a few at a time, between pieces of arithmetic: asked for in one
// go they fill the core's miss buffers, and the arithmetic waits.
constexpr size_t kScoreStep = 8;  // tokens
constexpr size_t kValueStep = 4;
constexpr size_t kFetchTokens = 64;
constexpr size_t kLineBytes = 64;

void to_bfloat16(const float* source, uint16_t* target, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, source + i, sizeof(bits));
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    target[i] = static_cast<uint16_t>(nan ? 0x7fc0u : rounded);
  }
}

void from_bfloat16(const uint16_t* source, float* target, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(source[i]) << 16;
    __builtin_memcpy(target + i, &bits, sizeof(bits));
  }
}

template <class Body>
void with_type(KVType type, const Body& body) {
  if (type == KVType::bfloat16) {
    body(uint16_t{});
  } else {
    body(float{});
  }
}

void prepare_queries(const HeadShape& shape, const float* queries, float scale, float* target) {
  with_type(shape.type, [&]<class KV>(KV) {
    for (size_t head = 0; head < shape.query_heads; ++head) {
      const float* from = queries + head * shape.head_dim;
      float* to = target + head * shape.head_dim;
      for (size_t i = 0; i < shape.head_dim; ++i) {
        to[kernel_order<KV>(i)] = from[i] * scale;
      }
    }
  });
}

// One step of the running softmax: n scores become weights, the row's state takes them in, and what
// was gathered before must be multiplied by the factor that is returned.
inline float soften(float* scores, size_t n, float& highest, float& weight) {
  Vec best = all(highest);
  const size_t end = (n + kLanes - 1) / kLanes * kLanes;
  for (size_t t = n; t < end; ++t) {
    scores[t] = kNoScore;
  }
  for (size_t t = 0; t < end; t += kLanes) {
    best = larger(load(scores + t), best);
  }
  const float raised = largest_of(best);
  Vec total{};
  for (size_t t = 0; t < end; t += kLanes) {
    const Vec w = exp_of_negative(load(scores + t) - all(raised));
    store(scores + t, w);
    total += w;
  }
  const float factor = exp_of_negative(all(highest - raised))[0];
  weight = weight * factor + sum_of(total);
  highest = raised;
  return factor;
}

// --- one row: decode -----------------------------------------------------------------------------

// Tokens that are scored together for H query heads: as many as make one vector of scores.
template <size_t H>
constexpr size_t kScoreRun = kLanes / H;

// Scores of up to kScoreRun<H> tokens for H query heads that share a KV head.
template <class KV, size_t D, size_t H>
inline void score_tokens(
    const float* queries, const KV* keys, size_t stride, size_t tokens, float* scores) {
  constexpr size_t kVecs = D / kLanes;
  constexpr size_t T = kScoreRun<H>;
  constexpr bool kHeld = H * kVecs <= kSumRegisters;  // the queries fit into registers
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

// values[h] = values[h] * factor[h] + sum over t of weights[h][t] * rows[t], for H query heads.
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

// Calls body(head, constant H) so that runs of 4, 2 and 1 heads make up `group` heads.
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

// Asks for one KV head's share of the rows that follow those of [rows, rows + tokens) in time.
template <class KV>
inline void fetch_share(const HeadShape& shape, const KV* rows, size_t tokens, size_t kv_head) {
  const size_t share = tokens * shape.head_dim * sizeof(KV);
  const auto* first =
      reinterpret_cast<const char*>(rows + kFetchTokens * shape.row_elements()) + kv_head * share;
  for (size_t byte = 0; byte < share; byte += kLineBytes) {
    prefetch(first + byte);
  }
}

// A tile, for all heads.
template <class KV, size_t D>
void attend_tile(
    const HeadShape& shape, const float* prepared, const KV* keys, const KV* values, size_t tokens,
    float* scores, Partial& out) {
  const size_t stride = shape.row_elements();
  const size_t group = shape.group();
  for (size_t t = 0; t < tokens; t += kScoreStep) {
    const size_t n = tokens - t < kScoreStep ? tokens - t : kScoreStep;
    for (size_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      const KV* rows = keys + t * stride;
      fetch_share(shape, rows, n, kv_head);
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
  for (size_t head = 0; head < shape.query_heads; ++head) {
    factors[head] =
        soften(scores + head * kTileTokens, tokens, out.highest[head], out.weight[head]);
  }
  for (size_t t = 0; t < tokens; t += kValueStep) {
    const size_t n = tokens - t < kValueStep ? tokens - t : kValueStep;
    for (size_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      const KV* rows = values + t * stride;
      fetch_share(shape, rows, n, kv_head);
      for_head_runs(group, [&](size_t run, auto heads) {
        const size_t head = kv_head * group + run;
        add_values<KV, D, decltype(heads)::value>(
            scores + head * kTileTokens + t, factors + head, rows + kv_head * D, stride, n,
            out.values + head * D);
      });
    }
    for (size_t head = 0; head < shape.query_heads; ++head) {
      factors[head] = 1.0f;  // what was gathered is scaled once per tile
    }
  }
}

inline void start(Partial& state, size_t heads, size_t head_dim) {
  for (size_t h = 0; h < heads; ++h) {
    state.highest[h] = kNoScore;
    state.weight[h] = 0.0f;
  }
  for (size_t i = 0; i < heads * head_dim; ++i) {
    state.values[i] = 0.0f;
  }
}

void attend_split(
    const HeadShape& shape, const float* prepared, const void* keys, const void* values,
    size_t tokens, Partial out) {
  float scores[kMaxQueryHeads * kTileTokens];
  start(out, shape.query_heads, shape.head_dim);
  with_type(shape.type, [&]<class KV>(KV) {
    for_head_dim(shape.head_dim, [&](auto dim) {
      constexpr size_t D = decltype(dim)::value;
      const size_t stride = shape.row_elements();
      for (size_t t = 0; t < tokens; t += kTileTokens) {
        const size_t n = tokens - t < kTileTokens ? tokens - t : kTileTokens;
        attend_tile<KV, D>(
            shape, prepared, static_cast<const KV*>(keys) + t * stride,
            static_cast<const KV*>(values) + t * stride, n, scores, out);
      }
    });
  });
}

// --- joining partial results ---------------------------------------------------------------------

// into = into and `more`, for one head.
inline void join(
    float& highest, float& weight, float* values, float more_highest, float more_weight,
    const float* more_values, size_t head_dim) {
  const float raised = highest > more_highest ? highest : more_highest;
  const float keep = exp_of_negative(all(highest - raised))[0];
  const float take = exp_of_negative(all(more_highest - raised))[0];
  for (size_t i = 0; i < head_dim; i += kLanes) {
    store(values + i, fma(load(values + i), all(keep), load(more_values + i) * all(take)));
  }
  weight = weight * keep + more_weight * take;
  highest = raised;
}

// out = values / weight, in natural order.
inline void divide(
    KVType type, const float* values, float weight, size_t head_dim, float* out) {
  with_type(type, [&]<class KV>(KV) {
    for (size_t i = 0; i < head_dim; ++i) {
      out[i] = values[kernel_order<KV>(i)] / weight;
    }
  });
}

void finish(const HeadShape& shape, const float* partials, size_t count, float* out) {
  const size_t size = Partial::floats(shape.query_heads, shape.head_dim);
  float joined[kMaxHeadDim];
  for (size_t head = 0; head < shape.query_heads; ++head) {
    float highest = kNoScore;
    float weight = 0.0f;
    for (size_t i = 0; i < shape.head_dim; ++i) {
      joined[i] = 0.0f;
    }
    for (size_t p = 0; p < count; ++p) {
      const Partial part =
          Partial::at(const_cast<float*>(partials) + p * size, shape.query_heads);
      join(highest, weight, joined, part.highest[head], part.weight[head],
           part.values + head * shape.head_dim, shape.head_dim);
    }
    divide(shape.type, joined, weight, shape.head_dim, out + head * shape.head_dim);
  }
}

// --- many rows of one sequence: prefill ----------------------------------------------------------

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
  add_tile<D, 2>(weights, factors, chunk.values, 0, seen[0], values);  // row i sees no more than i+1
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

// --- probe ---------------------------------------------------------------------------------------

uint64_t read_all(const std::byte* data, size_t bytes) {
  constexpr size_t kStreams = 4;  // far apart, so that several rows of memory are open at once
  constexpr size_t kAhead = 2048;
  const size_t part = bytes / kStreams;
  BitVec sum[kStreams][2] = {};
  for (size_t i = 0; i < part; i += 2 * sizeof(BitVec)) {
    for (size_t s = 0; s < kStreams; ++s) {
      const std::byte* p = data + s * part + i;
      __builtin_prefetch(p + kAhead, 0, 0);
      sum[s][0] += *reinterpret_cast<const UnalignedBits*>(p);
      sum[s][1] += *reinterpret_cast<const UnalignedBits*>(p + sizeof(BitVec));
    }
  }
  uint64_t total = 0;
  for (size_t s = 0; s < kStreams; ++s) {
    const BitVec both = sum[s][0] + sum[s][1];
    for (size_t i = 0; i < kLanes; ++i) {
      total += both[i];
    }
  }
  return total;
}

}  // namespace

#define QUIRE_TEXT_OF(x) #x
#define QUIRE_NAME_OF(x) QUIRE_TEXT_OF(x)

extern const Kernels kernels;
const Kernels kernels = {
    QUIRE_NAME_OF(QUIRE_ISA), to_bfloat16, from_bfloat16, prepare_queries, attend_split,
    finish, attend_chunk, read_all,
};

}  // namespace quire::cpu::QUIRE_ISA
