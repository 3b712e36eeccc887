#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

// Moves records between memory and files, for a cache on a disk, and computes their checksums. A
// record holds the bytes of one block in all regions, or of one state slot.
namespace quire {

// Returns the CRC-32C (Castagnoli; RFC 3720, appendix B.4) of bytes that follow others, whose
// CRC-32C is `before`. Uses the processor's instructions for this sum where it has them.
uint32_t crc32c(uint32_t before, const void* bytes, size_t count);
// The same by a table, on any processor.
uint32_t portable_crc32c(uint32_t before, const void* bytes, size_t count);

enum class Direction { to_file, from_file };

// A place in a file that others have opened.
struct FilePlace {
  // Throws std::out_of_range for a number that is no descriptor, for a negative offset, and for one
  // that leaves no room for `bytes`.
  FilePlace(int64_t fd, int64_t offset, size_t bytes);

  int fd;
  int64_t offset;
};

// Moves the pieces of memory, one behind the other, to or from the place in the file. Returns the
// CRC-32C of the bytes that follow others, whose CRC-32C is `before`. Throws std::system_error if
// the system fails a call; with the code EIO where the file ends before the record does.
uint32_t move_record(
    Direction direction, std::vector<iovec> pieces, const FilePlace& place, uint32_t before = 0);

}  // namespace quire
