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

double sum_from(const float* weights, float floor, size_t n) {
  Sum sum;
  for_each_vec(n, [&](size_t i, size_t count) {
    const Vec some = load_some(weights + i, count);
    sum.add(some >= all(floor) ? some : Vec{});
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
