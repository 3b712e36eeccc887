// Functions over a row of logits, to choose a token (ChooseKernels).

// Sums are computed in double. Half a vector of floats makes one vector of doubles.
typedef float HalfVec __attribute__((vector_size(kLanes * 2)));
typedef double DoubleVec __attribute__((vector_size(kLanes * 4)));

struct Sum {
  DoubleVec lower = {};
  DoubleVec upper = {};

  void add(Vec x) {
    HalfVec half[2];
    __builtin_memcpy(half, &x, sizeof(x));
    lower += __builtin_convertvector(half[0], DoubleVec);
    upper += __builtin_convertvector(half[1], DoubleVec);
  }
  double total() const {
    const DoubleVec both = lower + upper;
    double sum = 0.0;
    for (size_t i = 0; i < kLanes / 2; ++i) {
      sum += both[i];
    }
    return sum;
  }
};

float largest(const float* x, size_t n, bool* finite) {
  constexpr uint32_t kExponent = 0x7f800000u;
  Vec best = all(-__builtin_inff());
  IntVec strange = {};
  for_each_vec(n, [&](size_t i, size_t count) {
    const Vec some = load_filled(x + i, count, x[i]);
    best = larger(some, best);  // NaN is never larger
    strange |= (reinterpret_cast<BitVec>(some) & kExponent) == kExponent;
  });
  bool found = false;
  for (size_t i = 0; i < kLanes; ++i) {
    found = found || strange[i] != 0;
  }
  *finite = !found;
  return largest_of(best);
}

double weigh(const float* x, float highest, float scale, size_t n, float* weights) {
  Sum sum;
  for_each_vec(n, [&](size_t i, size_t count) {
    const Vec some = load_filled(x + i, count, -__builtin_inff());
    const Vec weight = exp_of_negative((some - all(highest)) * all(scale));
    const Vec number = weight > Vec{} ? weight : Vec{};  // NaN gets the weight 0
    store_some(weights + i, number, count);
    sum.add(number);
  });
  return sum.total();
}

size_t collect(const float* weights, float least, size_t n, float* out) {
  constexpr size_t kStep = 4 * kLanes;
  size_t count = 0;
  size_t i = 0;
  const auto take = [&](size_t end) {
    for (; i < end; ++i) {
      out[count] = weights[i];
      count += weights[i] >= least ? 1 : 0;
    }
  };
  while (i + kStep <= n) {
    const float* const p = weights + i;
    const Vec best = larger(larger(load(p), load(p + kLanes)),
                            larger(load(p + 2 * kLanes), load(p + 3 * kLanes)));
    if (largest_of(best) >= least) {
      take(i + kStep);
    } else {
      i += kStep;
    }
  }
  take(n);
  return count;
}

// Hashes tokens by "lowbias32" (Wellons), with the row's key mixed in.
inline BitVec hashed(BitVec x, const uint32_t* key) {
  x ^= key[0];
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15 ^ key[1]) * 0x846ca68bu;
  return x ^ x >> 16;
}

inline float noise_of(const float* table, int32_t hash) {
  const float number = static_cast<float>(hash);
  uint32_t bits;
  __builtin_memcpy(&bits, &number, sizeof(bits));
  const float* const value = table + (bits >> 16);
  return value[0] + value[kNoiseNumbers] * static_cast<float>(bits & 0xffffu);
}

Leader lead(
    const Scoring& scoring, const float* x, const float* weights, size_t n, uint32_t first) {
  // All noise is above kLeast, so the likeliest token's score is, too, and the winner's. With
  // v = hash / 2^32, noise is -log(-log(1 - v)) <= -log(v): to beat a score s, v < weight e^-s.
  constexpr float kLeast = -4.0f;
  constexpr float kReach = 54.7f * 0x1p31f;  // a bit above e^4 2^31
  Leader leader{kLeast, first};
  float reach = kReach;
  BitVec lanes;
  for (size_t i = 0; i < kLanes; ++i) {
    lanes[i] = static_cast<uint32_t>(i);
  }
  for_each_vec(n, [&](size_t i, size_t count) {
    const Vec weight = load_some(weights + i, count);
    if (scoring.floor > 0.0f && largest_of(weight) < scoring.floor) {
      return;
    }
    const uint32_t token = first + static_cast<uint32_t>(i);
    const BitVec hash = hashed(lanes + token, scoring.key);
    const Vec half = __builtin_convertvector(reinterpret_cast<IntVec>(hash >> 1), Vec);
    const Vec ahead = weight >= all(scoring.floor) ? weight * all(reach) - half : Vec{};
    if (largest_of(ahead) <= 0.0f) {
      return;
    }
    for (size_t j = 0; j < count; ++j) {
      if (ahead[j] > 0.0f) {
        const float score = (x[i + j] - scoring.highest) * scoring.scale +
                            noise_of(scoring.noise, static_cast<int32_t>(hash[j]));
        if (score > leader.score) {
          leader = {score, token + static_cast<uint32_t>(j)};
          reach = exp_of_negative(all(kLeast - score))[0] * kReach;
        }
      }
    }
  });
  return leader;
}
