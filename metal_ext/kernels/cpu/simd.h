// Vectors of QUIRE_LANES floats, and loads and stores of bfloat16 and float32. Each instruction set
// includes this file in a namespace of its own. The file must include nothing: library functions
// would be compiled to instructions that the machine may lack.

constexpr size_t kLanes = QUIRE_LANES;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t BitVec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t UnalignedBits __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
inline Vec all(float x) { return x - Vec{}; }  // exact, since x - 0 is x for every x
// Returns a * b + c, rounded once if an instruction does that. Compilers are told not to fuse other
// products and sums: they would fuse only some, and a row's bits would depend on other rows.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }

// Loads 2 * kLanes numbers into two vectors. If they are bfloat16, `first` gets the even indices
// and `second` the odd ones. A bfloat16 is the upper half of a float: shift or mask converts it.
inline void load_pair(const uint16_t* p, Vec& first, Vec& second) {
  const BitVec bits = *reinterpret_cast<const UnalignedBits*>(p);
  first = reinterpret_cast<Vec>(bits << 16);
  second = reinterpret_cast<Vec>(bits & 0xffff0000u);
}
inline void load_pair(const float* p, Vec& first, Vec& second) {
  first = load(p);
  second = load(p + kLanes);
}

// Returns where number i of a row stands in kernel order, which is the order of load_pair().
template <class KV>
constexpr size_t kernel_order(size_t i) {
  if constexpr (sizeof(KV) == 4) {
    return i;
  } else {
    const size_t in_pair = i % (2 * kLanes);
    return i - in_pair + in_pair / 2 + (in_pair % 2) * kLanes;
  }
}

template <int... index>
inline Vec pick(Vec a, Vec b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, index...);
#else
  return __builtin_shuffle(a, b, IntVec{index...});
#endif
}

// Cuts a and b into runs of `width` lanes. Adds the two halves of each run; a's sums come first.
template <int width, int... lane>
inline Vec fold(Vec a, Vec b, std::integer_sequence<int, lane...>) {
  constexpr int half = width / 2;
  return pick<(lane / half * width + lane % half)...>(a, b) +
         pick<(lane / half * width + lane % half + half)...>(a, b);
}

// Returns a vector whose lane i is the sum of all lanes of v[i]. The lanes are added by halving.
template <int width = static_cast<int>(kLanes)>
inline Vec sums(Vec* v) {
  if constexpr (width == 1) {
    return v[0];
  } else {
    for (int i = 0; i < width / 2; ++i) {
      v[i] = fold<width>(
          v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, static_cast<int>(kLanes)>{});
    }
    return sums<width / 2>(v);
  }
}

// Returns v with each lane exchanged for the lane that is `width / 2` lanes away.
template <int width, int... lane>
inline Vec across(Vec v, std::integer_sequence<int, lane...>) {
  return pick<(lane ^ (width / 2))...>(v, v);
}
using Lanes = std::make_integer_sequence<int, static_cast<int>(kLanes)>;

template <int width = static_cast<int>(kLanes)>
inline float sum_of(Vec v) {
  if constexpr (width == 1) {
    return v[0];
  } else {
    return sum_of<width / 2>(v + across<width>(v, Lanes{}));
  }
}

template <int width = static_cast<int>(kLanes)>
inline float largest_of(Vec v) {
  if constexpr (width == 1) {
    return v[0];
  } else {
    return largest_of<width / 2>(larger(v, across<width>(v, Lanes{})));
  }
}

// Returns e^x for x <= 0, to 2 ulp. Results below the smallest normal float are 0. NaN stays NaN.
// With x = n ln 2 + r, e^r is computed by its Taylor polynomial of degree 7 (remainder below 1e-8).
inline Vec exp_of_negative(Vec x) {
  const Vec lowest = all(-87.0f);
  const Vec clamped = x < lowest ? lowest : x;
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = fma(clamped, all(1.44269504f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, all(-0.693359375f), clamped);
  r = fma(n, all(2.12194440e-4f), r);
  Vec p = all(1.0f / 5040.0f);
  p = fma(p, r, all(1.0f / 720.0f));
  p = fma(p, r, all(1.0f / 120.0f));
  p = fma(p, r, all(1.0f / 24.0f));
  p = fma(p, r, all(1.0f / 6.0f));
  p = fma(p, r, all(0.5f));
  p = fma(p, r, all(1.0f));
  p = fma(p, r, all(1.0f));
  // Makes 2^n from its exponent bits. Adding n to p's exponent bits instead might change a NaN.
  const IntVec power = (reinterpret_cast<IntVec>(shifted) << 23) + 0x3f800000;
  return x < lowest ? all(0.0f) : p * reinterpret_cast<Vec>(power);
}

// Returns tanh(x), to 3 ulp. Where e^-2x would cancel, it is Cephes' polynomial.
inline Vec tanh_of(Vec x) {
  const Vec size = x < Vec{} ? -x : x;
  const Vec small = exp_of_negative(all(-2.0f) * size);
  const Vec square = x * x;
  Vec p = all(-5.70498872745e-3f);
  p = fma(p, square, all(2.06390887954e-2f));
  p = fma(p, square, all(-5.37397155531e-2f));
  p = fma(p, square, all(1.33314422036e-1f));
  p = fma(p, square, all(-3.33332819422e-1f));
  const Vec near = fma(p * square, size, size);
  const Vec result = size < all(0.625f) ? near : (all(1.0f) - small) / (all(1.0f) + small);
  return x < Vec{} ? -result : result;
}

template <class Body>
void with_type(KVType type, const Body& body) {
  if (type == KVType::bfloat16) {
    body(uint16_t{});
  } else {
    body(float{});
  }
}

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

// Returns a vector in which lanes of a and b alternate, from the lower (or upper) half of both.
template <bool upper, int... lane>
inline Vec zip(Vec a, Vec b, std::integer_sequence<int, lane...>) {
  constexpr int n = static_cast<int>(kLanes);
  return pick<(lane / 2 + lane % 2 * n + upper * n / 2)...>(a, b);
}

// Writes values / weight to out, in the natural order of dimensions, not kernel order (kernels.h).
inline void divide(
    KVType type, const float* values, float weight, size_t head_dim, float* out) {
  for (size_t i = 0; i < head_dim; i += 2 * kLanes) {
    const Vec first = load(values + i) / all(weight);
    const Vec second = load(values + i + kLanes) / all(weight);
    const bool pairs = type == KVType::bfloat16;
    store(out + i, pairs ? zip<false>(first, second, Lanes{}) : first);
    store(out + i + kLanes, pairs ? zip<true>(first, second, Lanes{}) : second);
  }
}
