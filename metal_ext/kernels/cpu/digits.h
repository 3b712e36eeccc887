// Rows of x cut into whole numbers, for layers of 4 and 8 bits: a group of x is one float32 times
// whole numbers of 24 bits, each of three digits to the base of 256. Sums of codes times digits are
// whole numbers of 32 bits, and so the same whoever makes them, and in whatever order. Included
// inside an instruction set's namespace, as simd.h is.
//
//   x[i] = largest / kLargestWhole * (digit[0][i] * 2^16 + digit[1][i] * 2^8 + digit[2][i])
//
// What is lost of each is at most about 2^-24 of the group's largest magnitude. A row, as prepared:
//
//   [groups]{ the largest magnitude, the sum of x } float32
//   [groups][3 digits][group] signed bytes

constexpr size_t kDigits = 3;
// Three signed bytes reach 127 * (2^16 + 2^8 + 1) = 8355711: that, less some room for rounding.
constexpr float kLargestWhole = 8355000.0f;

struct GroupFactors {
  float largest;
  float sum;
};

size_t factors_bytes(const LinearShape& shape) {
  return rounded_up(shape.groups() * sizeof(GroupFactors), kLineBytes);
}

// An odd number of cache lines: so the rows of a tile do not meet in few of a cache's sets.
size_t digit_row_bytes(const LinearShape& shape) {
  const size_t bytes = factors_bytes(shape) + kDigits * shape.inputs;
  return (rounded_up(bytes, kLineBytes) / kLineBytes | 1) * kLineBytes;
}

inline GroupFactors cut_group(const float* x, size_t group, std::byte* digits) {
  Vec sum = {};
  Vec most = {};
  for (size_t i = 0; i < group; i += kLanes) {
    const Vec numbers = load(x + i);
    sum += numbers;
    most = larger(_mm512_abs_ps(numbers), most);
  }
  // NaN is not the largest, and becomes zero below: the sum has it.
  const GroupFactors factors{largest_of(most), sum_of(sum)};
  // In two steps, as 1 / largest may be more than float32 holds: by its power of two, then by its
  // mantissa.
  const __m512 largest = _mm512_set1_ps(factors.largest == 0.0f ? 1.0f : factors.largest);
  const __m512 down = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_getexp_ps(largest));
  const __m512 up = _mm512_div_ps(
      _mm512_set1_ps(kLargestWhole),
      _mm512_getmant_ps(largest, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src));
  const __m512i half = _mm512_set1_epi32(128);
  for (size_t i = 0; i < group; i += kLanes, digits += kLanes) {
    const __m512 scaled = _mm512_mul_ps(_mm512_scalef_ps(load(x + i), down), up);
    const __m512i low = _mm512_cvtps_epi32(scaled);
    const __m512i middle = _mm512_srai_epi32(_mm512_add_epi32(low, half), 8);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(middle, half), 8);
    const auto keep = [&](size_t digit, __m512i number) {  // its lowest byte
      _mm_storeu_si128(reinterpret_cast<__m128i*>(digits + digit * group),
                       _mm512_cvtepi32_epi8(number));
    };
    keep(0, high);
    keep(1, middle);
    keep(2, low);
  }
  return factors;
}

void prepare_digits(const LinearShape& shape, const float* x, size_t row, std::byte* prepared) {
  std::byte* const target = prepared + row * digit_row_bytes(shape);
  auto* const factors = reinterpret_cast<GroupFactors*>(target);
  std::byte* digits = target + factors_bytes(shape);
  for (size_t g = 0; g < shape.groups(); ++g, digits += kDigits * shape.group) {
    factors[g] = cut_group(x + g * shape.group, shape.group, digits);
  }
}

static_assert(kLanes == kPanelOutputs);

// Of a group of weights and 16 outputs.
struct GroupScales {
  Vec scale;  // by which whole numbers are multiplied: the weights', over kLargestWhole
  Vec bias;
};

inline GroupScales scales_at(const LinearShape& shape, const std::byte* group) {
  GroupScales found;
  if (shape.scales == ScaleType::bfloat16) {
    load_pair(reinterpret_cast<const uint16_t*>(group), found.scale, found.bias);
  } else {
    load_pair(reinterpret_cast<const float*>(group), found.scale, found.bias);
  }
  found.scale = _mm512_mul_ps(found.scale, _mm512_set1_ps(1.0f / kLargestWhole));
  return found;
}

// Adds a group to its outputs' totals. sums: of codes times each digit, the highest first. The one
// place where whole numbers become others: so a row has the same bits whoever made the sums,
// which fit 32 bits, and those of the two lower digits together do: 255 * 128 * 128 * 257 < 2^31.
inline Vec add_group(const __m512i* sums, const GroupScales& weights, const GroupFactors* x,
                     Vec total) {
  const __m512i lower = _mm512_add_epi32(_mm512_slli_epi32(sums[1], 8), sums[2]);
  const __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[0]), _mm512_set1_ps(65536.0f),
                                       _mm512_cvtepi32_ps(lower));
  total = _mm512_fmadd_ps(_mm512_set1_ps(x->sum), weights.bias, total);
  return _mm512_fmadd_ps(_mm512_mul_ps(whole, weights.scale), _mm512_set1_ps(x->largest), total);
}

struct CodeCall : ProductCall {
  size_t x_stride = digit_row_bytes(shape);
  size_t x_digits = factors_bytes(shape);  // of a row, before its digits

  const std::byte* digits(size_t row, size_t group) const {
    return x + row * x_stride + x_digits + group * kDigits * shape.group;
  }
  const GroupFactors* factors(size_t row, size_t group) const {
    return reinterpret_cast<const GroupFactors*>(x + row * x_stride) + group;
  }
};

// The codes of a line: of 4 inputs and 16 outputs each, one below the other.
template <size_t Bits>
struct Line;
template <>
struct Line<8> {
  static constexpr size_t kParts = 1;
  static void read(const std::byte* line, __m512i* codes) { codes[0] = _mm512_loadu_si512(line); }
};
template <>
struct Line<4> {
  static constexpr size_t kParts = 2;
  static void read(const std::byte* line, __m512i* codes) {
    const __m512i both = _mm512_loadu_si512(line);
    const __m512i low = _mm512_set1_epi8(15);
    codes[0] = _mm512_and_si512(both, low);
    codes[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  }
};
