#include "core/records.h"

#include <limits.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

#include "core/checked.h"

// Implements transfers between memory and files by vectors of pieces.
namespace quire {
namespace {

// The most bytes of one call: enough for a disk to read at its speed. macOS refuses INT_MAX.
constexpr size_t kCallBytes = size_t{8} << 20;

// Moves the first bytes of the pieces from `first` on. Returns their number, at least 1.
size_t move_some(
    Direction direction, std::vector<iovec>& pieces, size_t first, int fd, int64_t offset) {
  size_t end = first;
  size_t bytes = 0;
  while (end < pieces.size() && end - first < IOV_MAX && bytes < kCallBytes) {
    bytes += pieces[end++].iov_len;
  }
  iovec& last = pieces[end - 1];
  const size_t beyond = std::max(bytes, kCallBytes) - kCallBytes;
  last.iov_len -= beyond;
  ssize_t moved;
  do {
    const auto vectors = narrowed<int>("pieces", end - first);
    moved = direction == Direction::to_file ? pwritev(fd, &pieces[first], vectors, offset)
                                            : preadv(fd, &pieces[first], vectors, offset);
  } while (moved < 0 && errno == EINTR);
  const int code = errno;
  last.iov_len += beyond;
  const char* const call = direction == Direction::to_file ? "pwritev" : "preadv";
  if (moved < 0) {
    throw std::system_error(code, std::generic_category(), message(call, " at ", offset));
  }
  if (moved == 0) {
    throw std::system_error(
        EIO, std::generic_category(), message(call, " at ", offset, ", where the file ends"));
  }
  return static_cast<size_t>(moved);
}

}  // namespace

FilePlace::FilePlace(int64_t fd_, int64_t offset_, size_t bytes)
    : fd(narrowed<int>("fd", checked_between("fd", fd_, 0, INT_MAX))), offset(offset_) {
  checked_between("offset", offset, 0, INT64_MAX - narrowed<int64_t>("bytes", bytes));
}

uint32_t move_record(
    Direction direction, std::vector<iovec> pieces, const FilePlace& place, uint32_t before) {
  uint32_t sum = before;
  int64_t offset = place.offset;
  size_t first = 0;
  while (first < pieces.size()) {
    size_t moved = move_some(direction, pieces, first, place.fd, offset);
    offset += static_cast<int64_t>(moved);
    while (moved > 0) {
      iovec& piece = pieces[first];
      const size_t bytes = std::min(moved, piece.iov_len);
      sum = crc32c(sum, piece.iov_base, bytes);
      piece = {static_cast<std::byte*>(piece.iov_base) + bytes, piece.iov_len - bytes};
      first += piece.iov_len == 0 ? 1 : 0;
      moved -= bytes;
    }
  }
  return sum;
}

}  // namespace quire
