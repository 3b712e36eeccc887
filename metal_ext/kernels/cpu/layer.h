// The operations of a layer between its matrix products, in float32 (LayerKernels).

// Cuts n numbers into runs of kLanes; the last may be shorter. Calls body(first, count) for each.
template <class Body>
inline void for_each_vec(size_t n, const Body& body) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    body(i, kLanes);
  }
  if (i < n) {
    body(i, n - i);
  }
}

// Loads `count` numbers into the first lanes, and 0 into the other lanes.
inline Vec load_some(const float* from, size_t count) {
  if (count == kLanes) {
    return load(from);
  }
  Vec some = {};
  __builtin_memcpy(&some, from, count * sizeof(float));
  return some;
}

// Loads `count` numbers into the first lanes, and `filler` into the other lanes.
inline Vec load_filled(const float* from, size_t count, float filler) {
  if (count == kLanes) {
    return load(from);
  }
  Vec some = all(filler);
  __builtin_memcpy(&some, from, count * sizeof(float));
  return some;
}

inline void store_some(float* to, Vec x, size_t count) {
  if (count == kLanes) {
    store(to, x);
  } else {
    __builtin_memcpy(to, &x, count * sizeof(float));
  }
}

void rms_norm(const float* x, const float* weight, float eps, size_t n, float* out) {
  Vec squares = {};
  for_each_vec(n, [&](size_t i, size_t count) {
    const Vec some = load_some(x + i, count);
    squares = fma(some, some, squares);
  });
  const float root = __builtin_sqrtf(sum_of(squares) / static_cast<float>(n) + eps);
  const Vec scale = all(1.0f / root);
  for_each_vec(n, [&](size_t i, size_t count) {
    store_some(out + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
  });
}

// Returns 1 / (1 + e^-x). Only exponentials of negative numbers are computed: they cannot overflow.
inline Vec sigmoid(Vec x) {
  const Vec small = exp_of_negative(x < Vec{} ? x : -x);
  return (x < Vec{} ? small : all(1.0f)) / (all(1.0f) + small);
}

inline Vec silu(Vec x) { return x * sigmoid(x); }

// Returns x / 2 * (1 + tanh(y)) = x * sigmoid(2 y) with y = sqrt(2 / pi) * (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
  const Vec cubed = all(0.044715f) * (x * x) * x;
  return x * sigmoid(all(1.5957691216f) * (x + cubed));
}

inline Vec clamped_silu(Vec gates, Vec up) {
  const Vec most = all(7.0f);
  const Vec g = gates > most ? most : gates;
  const Vec u = up > most ? most : (up < -most ? -most : up);
  return g * sigmoid(all(1.702f) * g) * (u + all(1.0f));
}

void gate(Gate kind, const float* gates, const float* up, size_t n, float* out) {
  for_each_vec(n, [&](size_t i, size_t count) {
    const Vec g = load_some(gates + i, count);
    const Vec u = load_some(up + i, count);
    switch (kind) {
      case Gate::silu: return store_some(out + i, silu(g) * u, count);
      case Gate::gelu_tanh: return store_some(out + i, gelu_tanh(g) * u, count);
      case Gate::clamped_silu: return store_some(out + i, clamped_silu(g, u), count);
    }
  });
}

void rotate(const float* x, const float* angles, size_t head_dim, float* out) {
  const size_t half = head_dim / 2;
  for_each_vec(half, [&](size_t i, size_t count) {
    const Vec first = load_some(x + i, count);
    const Vec second = load_some(x + half + i, count);
    const Vec cosine = load_some(angles + i, count);
    const Vec sine = load_some(angles + half + i, count);
    store_some(out + i, first * cosine - second * sine, count);
    store_some(out + half + i, first * sine + second * cosine, count);
  });
}

void add(const float* x, size_t n, float* to) {
  for_each_vec(n, [&](size_t i, size_t count) {
    store_some(to + i, load_some(to + i, count) + load_some(x + i, count), count);
  });
}

void add_scaled(const float* x, float scale, size_t n, float* to) {
  for_each_vec(n, [&](size_t i, size_t count) {
    store_some(to + i, fma(all(scale), load_some(x + i, count), load_some(to + i, count)), count);
  });
}

void softmax(const float* x, size_t n, float* out) {
  Vec most = all(-__builtin_inff());
  for_each_vec(n, [&](size_t i, size_t count) {
    most = larger(load_filled(x + i, count, x[i]), most);  // NaN is never larger
  });
  const Vec highest = all(largest_of(most));
  Vec sum = {};
  for_each_vec(n, [&](size_t i, size_t count) {
    store_some(out + i, exp_of_negative(load_filled(x + i, count, x[i]) - highest), count);
    sum += load_some(out + i, count);  // lanes past the end add nothing
  });
  const Vec scale = all(1.0f / sum_of(sum));
  for_each_vec(n, [&](size_t i, size_t count) {
    store_some(out + i, load_some(out + i, count) * scale, count);
  });
}
