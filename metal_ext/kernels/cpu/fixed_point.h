// Prepares rows of x as fixed-point numbers, for weights of 4 and 8 bits. A group of x becomes one
// float32 times whole numbers of 24, 16 or 8 bits, which are cut into bytes (limbs). Sums of codes
// times limbs are whole numbers of 32 bits, so they are exact in any order. The error is at most
// about 2^-24 (2^-16, 2^-8) of the group's largest magnitude.
//   x[i] = largest / kLargestWhole * (limb[0][i] * 2^16 + limb[1][i] * 2^8 + limb[2][i])
// The layout of a prepared row is:
//   [groups]{ the largest magnitude, the sum of x } float32
//   [groups][limbs][group] signed bytes

constexpr size_t kMostLimbs = 3;
// QUIRE_DOTS is defined if the instruction set adds products of bytes, and QUIRE_WIDE_DOTS if it
// adds them in 32 bits.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define QUIRE_WIDE_DOTS
#endif
#if defined(__AVX2__) || defined(QUIRE_WIDE_DOTS)
#define QUIRE_DOTS
#endif
// On arm64 (4 lanes) the instructions need signed codes, so 128 is subtracted from codes of 8 bits
// and, for the same results, from the numbers of E2M1 codes.
constexpr bool kSignedCodes = kLanes == 4;

// Returns the number of limbs (bytes of a number of x) for these weights, or 0 if x stays float32.
// Without QUIRE_WIDE_DOTS, only one limb with codes of 4 bits is faster than float32.
constexpr size_t limbs_of(const LinearShape& shape) {
  [[maybe_unused]] const bool narrow = shape.activations == Activations::int8;
#if defined(__AMX_INT8__)
  return shape.quantized() ? kMostLimbs : 0;
#elif defined(QUIRE_WIDE_DOTS)
  const size_t wide = shape.activations == Activations::bfloat16 ? 2 : kMostLimbs;
  return !shape.quantized() ? 0 : narrow ? 1 : wide;
#elif defined(QUIRE_DOTS)
  return narrow && shape.type == WeightType::bits4 ? 1 : 0;
#else
  return 0;
#endif
}

// The largest whole number of this many limbs, a little below 127 * (2^16 + 2^8 + 1) for 3 limbs.
template <size_t Limbs>
constexpr float kLargestWhole = Limbs == 3 ? 8355000.0f : Limbs == 2 ? 32638.0f : 127.0f;

// Calls body with the number of limbs of x, limbs_of(shape), as a compile-time constant.
template <class Body>
void with_limbs(const LinearShape& shape, const Body& body) {
  switch (limbs_of(shape)) {
    case 1: return body(std::integral_constant<size_t, 1>{});
#if defined(QUIRE_WIDE_DOTS)
    case 2: return body(std::integral_constant<size_t, 2>{});
    default: return body(std::integral_constant<size_t, 3>{});
#endif
  }
}

struct GroupFactors {
  float largest;
  float sum;
};

size_t factors_bytes(const LinearShape& shape) {
  return rounded_up(shape.groups() * sizeof(GroupFactors), kLineBytes);
}

size_t fixed_point_row_bytes(const LinearShape& shape) {
  return odd_lines(factors_bytes(shape) + limbs_of(shape) * shape.inputs);
}

template <size_t Limbs>
inline GroupFactors split_group(const float* x, size_t group, std::byte* limbs) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Vec sum = {};
  Vec most = {};
  for (size_t i = 0; i < group; i += kLanes) {
    const Vec numbers = load(x + i);
    sum += numbers;
    most = larger(numbers < Vec{} ? -numbers : numbers, most);
  }
  // A NaN in x may become any whole number, but the group's sum is NaN, and so is the output.
  const GroupFactors factors{largest_of(most), sum_of(sum)};
  // A small `largest` is first multiplied by 2^64, because 1 / largest might overflow float32.
  const float up = factors.largest < 0x1p-64f ? 0x1p64f : 1.0f;
  const float least = factors.largest * up;
  const Vec scale = all(kLargestWhole<Limbs> / (least == 0.0f ? 1.0f : least));
  for (size_t i = 0; i < group; i += kLanes, limbs += kLanes) {
    const Vec scaled = load(x + i) * all(up) * scale;
    const Vec rounded = scaled + (scaled < Vec{} ? all(-0.5f) : all(0.5f));
    IntVec number = __builtin_convertvector(rounded, IntVec);
    for (size_t limb = Limbs; limb-- > 0;) {  // from the lowest byte up
      const Bytes bytes = __builtin_convertvector(number, Bytes);
      __builtin_memcpy(limbs + limb * group, &bytes, sizeof(bytes));
      number = (number + 128) >> 8;
    }
  }
  return factors;
}

void prepare_fixed_point(
    const LinearShape& shape, const float* x, size_t row, std::byte* prepared) {
  std::byte* const target = prepared + row * fixed_point_row_bytes(shape);
  auto* const factors = reinterpret_cast<GroupFactors*>(target);
  std::byte* limbs = target + factors_bytes(shape);
  with_limbs(shape, [&](auto count) {
    for (size_t g = 0; g < shape.groups(); ++g, limbs += count * shape.group) {
      factors[g] = split_group<count>(x + g * shape.group, shape.group, limbs);
    }
  });
}

// The scales and biases of a group of inputs, for the outputs of a panel.
struct GroupScales {
  Vec scale[kPanelVecs];  // the weights' scales divided by kLargestWhole
  Vec bias[kPanelVecs];
};

template <WeightType Type, size_t Limbs>
inline GroupScales scales_at(const LinearShape& shape, const std::byte* group) {
  GroupScales found;
  if constexpr (Type == WeightType::e2m1) {
    read_exponents(reinterpret_cast<const uint8_t*>(group), found.scale, found.bias);
  } else if (shape.scales == ScaleType::bfloat16) {
    read_pair(reinterpret_cast<const uint16_t*>(group), found.scale, found.bias);
  } else {
    read_pair(reinterpret_cast<const float*>(group), found.scale, found.bias);
  }
  for (size_t v = 0; v < kPanelVecs; ++v) {
    if (kSignedCodes && Type != WeightType::bits4) {
      found.bias[v] = fma(found.scale[v], all(128.0f), found.bias[v]);
    }
    found.scale[v] *= all(1.0f / kLargestWhole<Limbs>);
  }
  return found;
}

// Returns `total` plus a group's part. `sums` has the sum of codes times each limb, highest limb
// first. Whole numbers become floats only here, so that all instruction sets give the same bits.
// The two lower sums are added as integers, which fits 32 bits: 255 * 128 * 128 * 257 < 2^31.
template <size_t Limbs>
inline Vec add_group(const IntVec* sums, Vec scale, Vec bias, const GroupFactors* x, Vec total) {
  IntVec lower = sums[Limbs - 1];
  if constexpr (Limbs > 1) {
    lower += sums[Limbs - 2] << 8;
  }
  Vec whole = __builtin_convertvector(lower, Vec);
  if constexpr (Limbs > 2) {
    whole = fma(__builtin_convertvector(sums[0], Vec), all(65536.0f), whole);
  }
  return fma(whole * scale, all(x->largest), fma(all(x->sum), bias, total));
}

struct CodeCall : ProductCall {
  size_t x_stride = fixed_point_row_bytes(shape);
  size_t x_limbs = factors_bytes(shape);  // offset of a row's limbs
  size_t group_limbs = limbs_of(shape) * shape.group;

  const std::byte* limbs(size_t row, size_t group) const {
    return x + row * x_stride + x_limbs + group * group_limbs;
  }
  const GroupFactors* factors(size_t row, size_t group) const {
    return reinterpret_cast<const GroupFactors*>(x + row * x_stride) + group;
  }
};

// read_codes() unpacks a vector of words into this many vectors, each with the codes of 4 inputs.
template <WeightType Type>
constexpr size_t kCodeParts = Type == WeightType::bits8 ? 1 : 2;

inline BitVec signed_if_needed(BitVec codes) {
  return kSignedCodes ? codes ^ 0x80808080u : codes;
}

template <WeightType Type>
inline void read_codes(const std::byte* from, BitVec* codes) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
  const BitVec both = *reinterpret_cast<const UnalignedBits*>(from);
  if constexpr (Type == WeightType::bits8) {
    codes[0] = signed_if_needed(both);
  } else {
    codes[0] = both & 0x0f0f0f0fu;
    codes[1] = reinterpret_cast<BitVec>(reinterpret_cast<Bytes>(both) >> 4);
  }
  if constexpr (Type == WeightType::e2m1) {
    codes[0] = signed_if_needed(e2m1_numbers(codes[0]));
    codes[1] = signed_if_needed(e2m1_numbers(codes[1]));
  }
}
