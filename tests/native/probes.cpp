#include "probes.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>

namespace {

thread_local int calls_left = -1;  // -1: nothing is refused
thread_local int refusals_left = 0;
thread_local int madvise_error = 0;

bool refused_now() {
  if (calls_left < 0) {
    return false;
  }
  if (calls_left > 0) {
    --calls_left;
    return false;
  }
  if (refusals_left == 0) {
    return false;
  }
  --refusals_left;
  return true;
}

}  // namespace

extern "C" {

void* __real_mmap(void*, size_t, int, int, int, off_t);

void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (refused_now()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return __real_mmap(address, bytes, protection, flags, fd, offset);
}

int __real_madvise(void*, size_t, int);

int __wrap_madvise(void* address, size_t bytes, int advice) {
  if (madvise_error != 0) {
    errno = madvise_error;
    return -1;
  }
  return __real_madvise(address, bytes, advice);
}

}  // extern "C"

namespace quire::test {

bool readable(const void* address) {
  int ends[2];
  if (pipe(ends) != 0) {
    return false;
  }
  const bool written = write(ends[1], address, 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return written;
}

bool writable(void* address) {
  int ends[2];
  if (pipe(ends) != 0) {
    return false;
  }
  const bool copied = write(ends[1], address, 1) == 1 && read(ends[0], address, 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return copied;
}

std::vector<std::string> mappings_inside(const void* base, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(base);
  const uintptr_t last = first + bytes;
  std::vector<std::string> found;
  std::ifstream lines("/proc/self/maps");
  for (std::string line; std::getline(lines, line);) {
    uintptr_t from = 0;
    uintptr_t to = 0;
    int rest = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %n", &from, &to, &rest) != 2 ||
        to <= first || from >= last) {
      continue;
    }
    // Neighbours may join the outermost ones: only what lies inside counts.
    char place[64];
    std::snprintf(place, sizeof(place), "%" PRIxPTR "-%" PRIxPTR " ", std::max(from, first),
                  std::min(to, last));
    found.push_back(place + line.substr(static_cast<size_t>(rest)));
  }
  return found;
}

size_t address_space_bytes() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

size_t heap_mappings() {
  size_t count = 0;
  std::ifstream lines("/proc/self/maps");
  for (std::string line; std::getline(lines, line);) {
    count += line.find("quire-heap") != std::string::npos;
  }
  return count;
}

RefuseMmap::RefuseMmap(int calls, int refused) {
  refusals_left = refused;
  calls_left = calls;
}

RefuseMmap::~RefuseMmap() {
  calls_left = -1;
}

RefuseMadvise::RefuseMadvise(int error) {
  madvise_error = error;
}

RefuseMadvise::~RefuseMadvise() {
  madvise_error = 0;
}

}  // namespace quire::test
