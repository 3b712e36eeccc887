#pragma once

#include <cstddef>
#include <string>
#include <vector>

// What the tests ask the system, and how they make it refuse.
namespace quire::test {

// Whether a byte can be read; asks the system, so that nothing crashes.
bool readable(const void* address);

// Whether a byte can be written; asks the system, and leaves the byte as it was. Commits its page.
bool writable(void* address);

// The mappings of this process inside [base, base + bytes): addresses, protection, what is mapped.
// Two equal answers mean that nothing was changed in between.
std::vector<std::string> mappings_inside(const void* base, size_t bytes);

// All addresses that this process has reserved or mapped.
size_t address_space_bytes();

// Lines of the process's map that name a quire heap.
size_t heap_mappings();

// Lets `calls` more calls of mmap through on this thread, and refuses the next `refused` with
// ENOMEM, until it goes. The program is linked with -Wl,--wrap=mmap.
class RefuseMmap {
 public:
  explicit RefuseMmap(int calls, int refused = 1);
  ~RefuseMmap();
  RefuseMmap(const RefuseMmap&) = delete;
  RefuseMmap& operator=(const RefuseMmap&) = delete;
};

// Has every madvise of this thread fail with that error, until it goes. The program is linked with
// -Wl,--wrap=madvise.
class RefuseMadvise {
 public:
  explicit RefuseMadvise(int error);
  ~RefuseMadvise();
  RefuseMadvise(const RefuseMadvise&) = delete;
  RefuseMadvise& operator=(const RefuseMadvise&) = delete;
};

}  // namespace quire::test
