#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// Returns the CRC-32C (Castagnoli; RFC 3720, appendix B.4) of bytes that follow others, whose
// CRC-32C is `before`. Uses the processor's instructions for this sum where it has them.
uint32_t crc32c(uint32_t before, const void* bytes, size_t count);
// The same by a table, on any processor.
uint32_t portable_crc32c(uint32_t before, const void* bytes, size_t count);

}  // namespace quire
