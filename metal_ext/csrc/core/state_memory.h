#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// Memory for cells, which recurrent layers keep their states in: zeros until they are written, at
// an address that never changes. Pages are committed when they are touched.
class StateMemory {
 public:
  static constexpr int64_t kMaxBytes = int64_t{1} << 46;

  // Whole pages, so many bytes at least. Throws std::out_of_range, and std::system_error where the
  // system has no addresses.
  explicit StateMemory(int64_t bytes);
  ~StateMemory();
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;

  std::byte* address() const { return address_; }
  size_t bytes() const { return bytes_; }

  // Gives the memory of [offset, offset + bytes) back to the system: it holds zeros then. Throws
  // std::out_of_range, and std::invalid_argument where these are no whole pages.
  void release(int64_t offset, int64_t bytes);
  // How much of [offset, offset + bytes) is in memory. Throws as release() does.
  size_t committed(int64_t offset, int64_t bytes) const;

 private:
  std::byte* pages_at(int64_t offset, int64_t bytes) const;

  size_t bytes_;
  std::byte* address_;
};

}  // namespace quire
