#include <array>
#include <cstring>

#include "core/records.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define QUIRE_HAS_CRC __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#define QUIRE_HAS_CRC __attribute__((target("+crc")))
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

// Computes CRC-32C. An instruction takes eight bytes, and three cycles, so that three lanes are
// summed side by side.
namespace quire {
namespace {

// Returns the sum after one further bit, which is 0. The polynomial's bits are reversed.
constexpr uint32_t after_bit(uint32_t sum) {
  return sum >> 1 ^ ((sum & 1u) != 0 ? 0x82f63b78u : 0u);
}

constexpr std::array<uint32_t, 256> kTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    table[byte] = byte;
    for (int bit = 0; bit < 8; ++bit) {
      table[byte] = after_bit(table[byte]);
    }
  }
  return table;
}();

#if defined(__x86_64__)
QUIRE_HAS_CRC uint32_t add_word(uint32_t sum, uint64_t word) {
  return _mm_crc32_u64(sum, word) & 0xffffffffu;
}
QUIRE_HAS_CRC uint32_t add_byte(uint32_t sum, uint8_t byte) { return _mm_crc32_u8(sum, byte); }
bool has_instructions() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__)
QUIRE_HAS_CRC uint32_t add_word(uint32_t sum, uint64_t word) { return __crc32cd(sum, word); }
QUIRE_HAS_CRC uint32_t add_byte(uint32_t sum, uint8_t byte) { return __crc32cb(sum, byte); }
#ifdef __linux__
bool has_instructions() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#else
bool has_instructions() { return true; }  // every arm64 Mac
#endif
#endif

#ifdef QUIRE_HAS_CRC
constexpr size_t kLaneBytes = 4096;

// A linear map of sums: what each of the 32 bits becomes.
using Matrix = std::array<uint32_t, 32>;

constexpr uint32_t applied(const Matrix& matrix, uint32_t sum) {
  uint32_t result = 0;
  for (size_t bit = 0; bit < matrix.size(); ++bit) {
    result ^= matrix[bit] & (0u - (sum >> bit & 1u));
  }
  return result;
}

// Gives the sum after a lane of zeros, which is after_bit() applied 2^15 times.
constexpr Matrix kAfterLane = [] {
  Matrix matrix{};
  for (size_t bit = 0; bit < matrix.size(); ++bit) {
    matrix[bit] = after_bit(1u << bit);
  }
  for (size_t bits = 1; bits < 8 * kLaneBytes; bits *= 2) {
    const Matrix half = matrix;
    for (uint32_t& column : matrix) {
      column = applied(half, column);
    }
  }
  return matrix;
}();

uint64_t word_at(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

QUIRE_HAS_CRC uint32_t quick_crc32c(uint32_t before, const void* bytes, size_t count) {
  const auto* at = static_cast<const uint8_t*>(bytes);
  uint32_t sum = ~before;
  for (; count >= 3 * kLaneBytes; at += 3 * kLaneBytes, count -= 3 * kLaneBytes) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kLaneBytes; i += sizeof(uint64_t)) {
      sum = add_word(sum, word_at(at + i));
      second = add_word(second, word_at(at + kLaneBytes + i));
      third = add_word(third, word_at(at + 2 * kLaneBytes + i));
    }
    sum = applied(kAfterLane, applied(kAfterLane, sum) ^ second) ^ third;
  }
  for (; count >= sizeof(uint64_t); at += sizeof(uint64_t), count -= sizeof(uint64_t)) {
    sum = add_word(sum, word_at(at));
  }
  for (; count > 0; ++at, --count) {
    sum = add_byte(sum, *at);
  }
  return ~sum;
}
#endif

}  // namespace

uint32_t portable_crc32c(uint32_t before, const void* bytes, size_t count) {
  const auto* const first = static_cast<const uint8_t*>(bytes);
  uint32_t sum = ~before;
  for (size_t i = 0; i < count; ++i) {
    sum = sum >> 8 ^ kTable[(sum ^ first[i]) & 0xffu];
  }
  return ~sum;
}

uint32_t crc32c(uint32_t before, const void* bytes, size_t count) {
#ifdef QUIRE_HAS_CRC
  static const bool quick = has_instructions();
  if (quick) {
    return quick_crc32c(before, bytes, count);
  }
#endif
  return portable_crc32c(before, bytes, count);
}

}  // namespace quire
