#include "system_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace quire::fake {
namespace {

std::byte* checked(void* address, const char* what) {
  if (address == MAP_FAILED) {
    std::perror(what);
    std::abort();
  }
  return static_cast<std::byte*>(address);
}

}  // namespace

MemoryFile::MemoryFile(size_t bytes) : bytes_(bytes), descriptor_(memfd_create("fake", 0)) {
  if (descriptor_ < 0 || ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
    std::perror("fake Metal: memfd");
    std::abort();
  }
  contents_ = checked(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0), "fake Metal: mmap");
  std::memset(contents_, 0xff, bytes);
}

MemoryFile::~MemoryFile() {
  munmap(contents_, bytes_);
  close(descriptor_);
}

Addresses::Addresses(size_t bytes, size_t alignment) : reserved_bytes_(bytes + alignment) {
  reserved_ = checked(
      mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
      "fake Metal: mmap");
  const auto start = reinterpret_cast<uint64_t>(reserved_);
  first_ = reserved_ + ((start + alignment - 1) / alignment * alignment - start);
}

Addresses::~Addresses() { munmap(reserved_, reserved_bytes_); }

void Addresses::map(size_t offset, const MemoryFile& file, size_t file_offset, size_t bytes) {
  checked(
      mmap(first_ + offset, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
           file.descriptor(), static_cast<off_t>(file_offset)),
      "fake Metal: mmap");
}

void Addresses::unmap(size_t offset, size_t bytes) {
  checked(
      mmap(first_ + offset, bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0),
      "fake Metal: mmap");
}

}  // namespace quire::fake
