#include "core/posix_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "core/checked.h"

#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // since Linux 5.14; older headers lack it
#endif

// Implements the system calls for ranges and heaps in the CPU's memory, on Linux and macOS.
namespace quire {
namespace {

[[noreturn]] void fail(const char* call, size_t bytes) {
  const int code = errno;  // saved before another call changes it
  throw std::system_error(code, std::generic_category(), message(call, " of ", bytes, " bytes"));
}

void map_fixed(void* address, size_t bytes, int protection, int flags, int fd, size_t offset) {
  void* got = mmap(address, bytes, protection, flags | MAP_FIXED, fd, static_cast<off_t>(offset));
  if (got == MAP_FAILED) {
    fail("mmap", bytes);
  }
}

size_t pages_below() {
  return 2 * system_page_bytes();
}

#ifndef __linux__
int open_unlinked_object() {
  // On a Mac, names of shared memory hold at most 31 characters, and all processes share them.
  static std::atomic<unsigned> serial{0};
  const std::string name = message("/quire.", getpid(), ".", serial.fetch_add(1));
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR);
  if (fd >= 0) {
    shm_unlink(name.c_str());
  }
  return fd;
}
#endif

}  // namespace

size_t system_page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

int create_shared_memory(size_t bytes) {
#ifdef __linux__
  const int fd = memfd_create("quire-heap", MFD_CLOEXEC);
#else
  const int fd = open_unlinked_object();
#endif
  if (fd < 0) {
    fail("creating shared memory", bytes);
  }
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    fail("ftruncate", bytes);
  }
  return fd;
}

void close_shared_memory(int fd) {
  close(fd);
}

size_t shared_memory_committed(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) {
    fail("fstat", 0);
  }
#ifdef __linux__
  return static_cast<size_t>(status.st_blocks) * 512;
#else
  return static_cast<size_t>(status.st_size);
#endif
}

void punch_hole(int fd, size_t offset, size_t bytes) {
#ifdef __linux__
  if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes)) != 0) {
    fail("fallocate(PUNCH_HOLE)", bytes);
  }
#else
  (void)fd, (void)offset;
  errno = ENOTSUP;
  fail("punching a hole", bytes);
#endif
}

std::byte* reserve_addresses(size_t bytes) {
  void* start = mmap(
      nullptr, pages_below() + bytes, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    fail("reserving address space", bytes);
  }
  std::byte* const base = static_cast<std::byte*>(start) + pages_below();
  try {
    map_private_zeros(start, pages_below());
    if (!make_spare(base)) {
      fail("mprotect", system_page_bytes());
    }
  } catch (const std::system_error&) {
    release_addresses(base, bytes);
    throw;
  }
  std::memcpy(base - sizeof(bytes), &bytes, sizeof(bytes));
  return base;
}

void release_addresses(std::byte* base, size_t bytes) {
  munmap(base - pages_below(), pages_below() + bytes);
}

void give_up_spare(std::byte* base) {
  // The spare page gets the header page's protection, so that both become one mapping.
  if (mprotect(base - pages_below(), system_page_bytes(), PROT_READ | PROT_WRITE) != 0) {
    fail("mprotect", system_page_bytes());
  }
}

bool make_spare(std::byte* base) {
  return mprotect(base - pages_below(), system_page_bytes(), PROT_READ) == 0;
}

void map_shared(void* address, size_t bytes, int fd, size_t offset, bool writable) {
  map_fixed(address, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, offset);
}

void populate(void* address, size_t bytes) noexcept {
#ifdef __linux__
  // On failure (an old Linux, or no memory), first writes take page faults. Writing to the
  // memory would commit it, too, but could raise SIGBUS. This call cannot.
  (void)madvise(address, bytes, MADV_POPULATE_WRITE);
#else
  (void)address, (void)bytes;
#endif
}

void map_private_zeros(void* address, size_t bytes) {
  map_fixed(address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
}

void map_nothing(void* address, size_t bytes) {
  map_fixed(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
}

void give_back_private(void* address, size_t bytes) {
#ifdef __linux__
  if (madvise(address, bytes, MADV_DONTNEED) != 0) {
    fail("madvise", bytes);
  }
#else
  map_private_zeros(address, bytes);  // a Mac's MADV_DONTNEED keeps the old contents
#endif
}

size_t private_committed(void* address, size_t bytes) {
#ifdef __APPLE__
  using Page = char;
#else
  using Page = unsigned char;
#endif
  std::array<Page, 16384> pages;  // states of the pages of one call
  const size_t most = pages.size() * system_page_bytes();
  size_t found = 0;
  for (size_t done = 0; done < bytes; done += most) {
    const size_t part = std::min(most, bytes - done);
    if (mincore(static_cast<char*>(address) + done, part, pages.data()) != 0) {
      fail("mincore", part);
    }
    const auto end = pages.begin() + static_cast<std::ptrdiff_t>(part / system_page_bytes());
    found += static_cast<size_t>(
        std::count_if(pages.begin(), end, [](Page page) { return (page & 1) != 0; }));
  }
  return found * system_page_bytes();
}

}  // namespace quire
