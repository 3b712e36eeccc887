// The convolution, the unit vectors and the recurrence of a gated delta net, in float32 (Yang,
// Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464). A token changes the state S:
//   S = decay S + (v - decay S k) beta k^T,   y = S q.

void convolve(
    const float* const* rows, const float* weights, size_t taps, size_t stride, size_t n,
    float* out) {
  for_each_vec(n, [&](size_t i, size_t count) {
    Vec sum = {};
    for (size_t tap = 0; tap < taps; ++tap) {
      if (rows[tap] != nullptr) {
        sum = fma(load_some(rows[tap] + i, count), load_some(weights + tap * stride + i, count),
                  sum);
      }
    }
    store_some(out + i, silu(sum), count);
  });
}

void normalize(const float* x, float eps, float scale, size_t n, float* out) {
  Vec squares = {};
  for_each_vec(n, [&](size_t i, size_t count) {
    const Vec some = load_some(x + i, count);
    squares = fma(some, some, squares);
  });
  const Vec factor = all(scale / __builtin_sqrtf(sum_of(squares) + eps));
  for_each_vec(n, [&](size_t i, size_t count) {
    store_some(out + i, load_some(x + i, count) * factor, count);
  });
}

// Each loaded vector of a key or query serves this many rows of the state.
constexpr size_t kStateRows = 4;

// Sets partial[i] to a vector whose lanes add up to the product of the state's row i and x.
inline void state_times(const float* state, const float* x, size_t dims, Vec* partial) {
  for (size_t row = 0; row < kLanes; row += kStateRows) {
    const float* const rows = state + row * dims;
    Vec sum[kStateRows] = {};
    for (size_t i = 0; i < dims; i += kLanes) {
      const Vec some = load(x + i);
      for (size_t r = 0; r < kStateRows; ++r) {
        sum[r] = fma(load(rows + r * dims + i), some, sum[r]);
      }
    }
    for (size_t r = 0; r < kStateRows; ++r) {
      partial[row + r] = sum[r];
    }
  }
}

// Computes the next state `to` = `from` * decay + change k^T. Sets partial[i] to a vector whose
// lanes add up to the product of row i of `to` and q.
inline void state_step(
    const float* from, float* to, const float* key, const float* query, const float* change,
    float decay, size_t dims, Vec* partial) {
  const Vec kept = all(decay);
  for (size_t row = 0; row < kLanes; row += kStateRows) {
    Vec added[kStateRows];
    Vec sum[kStateRows] = {};
    for (size_t r = 0; r < kStateRows; ++r) {
      added[r] = all(change[row + r]);
    }
    for (size_t i = 0; i < dims; i += kLanes) {
      const Vec k = load(key + i);
      const Vec q = load(query + i);
      for (size_t r = 0; r < kStateRows; ++r) {
        const size_t at = (row + r) * dims + i;
        const Vec next = fma(k, added[r], load(from + at) * kept);
        store(to + at, next);
        sum[r] = fma(next, q, sum[r]);
      }
    }
    for (size_t r = 0; r < kStateRows; ++r) {
      partial[row + r] = sum[r];
    }
  }
}

// Computes all tokens for kLanes rows of the state before the next rows, to keep rows in the cache.
void recur(const DeltaHead& head, const DeltaRun& run) {
  const size_t dims = head.key_dim;
  for (size_t row = 0; row < head.value_dim; row += kLanes) {
    float* const to = run.to + row * dims;
    const float* from = run.from + row * dims;
    if (run.from == nullptr) {
      __builtin_memset(to, 0, kLanes * dims * sizeof(float));
      from = to;
    }
    for (size_t t = 0; t < run.count; ++t) {
      const float* const key = run.keys + t * run.stride;
      const float* const query = run.queries + t * run.stride;
      Vec partial[kLanes];
      float change[kLanes];
      state_times(from, key, dims, partial);
      const Vec recalled = sums(partial) * all(run.decays[t]);
      store(change, (load(run.values + t * run.stride + row) - recalled) * all(run.betas[t]));
      state_step(from, to, key, query, change, run.decays[t], dims, partial);
      store(run.out + t * run.out_stride + row, sums(partial));
      from = to;
    }
  }
}
