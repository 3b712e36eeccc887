#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/records.h"

namespace quire {
namespace {

TEST("known bytes have the sums that RFC 3720 lists") {
  std::vector<unsigned char> rising(32);
  for (size_t i = 0; i < rising.size(); ++i) {
    rising[i] = static_cast<unsigned char>(i);
  }
  for (const auto sum : {&crc32c, &portable_crc32c}) {
    CHECK(sum(0, "", 0) == 0);
    CHECK(sum(0, "123456789", 9) == 0xe3069283u);
    CHECK(sum(0, std::string(32, '\0').data(), 32) == 0x8a9136aau);
    CHECK(sum(0, std::string(32, '\xff').data(), 32) == 0x62a8ab43u);
    CHECK(sum(0, rising.data(), 32) == 0x46dd794eu);
  }
}

TEST("any bytes have one sum, by instructions and by the table, in one part or in two") {
  std::mt19937 random(1);
  std::vector<unsigned char> bytes(100'000);
  for (auto& byte : bytes) {
    byte = static_cast<unsigned char>(random());
  }
  for (const size_t count : {0, 1, 7, 8, 9, 4096, 12'287, 12'288, 12'289, 24'576, 40'001, 99'990}) {
    const unsigned char* const first = bytes.data() + random() % 10;
    const size_t part = random() % (count + 1);
    const uint32_t sum = crc32c(0, first, count);
    CHECK_CASE(sum == portable_crc32c(0, first, count), std::to_string(count));
    CHECK_CASE(sum == crc32c(crc32c(0, first, part), first + part, count - part),
               std::to_string(part));
  }
}

}  // namespace
}  // namespace quire
