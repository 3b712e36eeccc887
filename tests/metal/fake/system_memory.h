#pragma once

#include <cstddef>
#include <cstdint>

namespace quire::fake {

// A file of memory: pages that can be mapped at several addresses.
class MemoryFile {
 public:
  // Filled with 0xff, which is NaN in every format: whoever reads what it did not write is seen.
  explicit MemoryFile(size_t bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int descriptor() const { return descriptor_; }
  std::byte* contents() const { return contents_; }

 private:
  const size_t bytes_;
  int descriptor_;
  std::byte* contents_;
};

// Addresses without memory, aligned to `alignment`, a power of two.
class Addresses {
 public:
  Addresses(size_t bytes, size_t alignment);
  ~Addresses();
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;

  uint64_t first() const { return reinterpret_cast<uint64_t>(first_); }
  void map(size_t offset, const MemoryFile& file, size_t file_offset, size_t bytes);
  void unmap(size_t offset, size_t bytes);

 private:
  std::byte* reserved_;
  size_t reserved_bytes_;
  std::byte* first_;
};

}  // namespace quire::fake
