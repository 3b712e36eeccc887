#pragma once

#include <cstddef>

// The few system calls that the POSIX substrate stands on. Each but populate() throws
// std::system_error that names the call and its bytes.
namespace quire {

size_t system_page_bytes();

// An anonymous shared-memory file of that size: memfd on Linux, an unlinked shm object on a Mac.
// Sparse: it holds no memory until it is written.
int create_shared_memory(size_t bytes);
void close_shared_memory(int fd);

// The bytes that the system charges for the file: st_blocks on Linux, its whole size on a Mac.
size_t shared_memory_committed(int fd);

// A part of a shared-memory file can be given back on Linux, and not on a Mac.
#ifdef __linux__
constexpr bool kPunchesHoles = true;
#else
constexpr bool kPunchesHoles = false;
#endif
// Gives the memory of [offset, offset + bytes) back to the system; later reads give zeros.
void punch_hole(int fd, size_t offset, size_t bytes);

// Address space without memory behind it: any access is SIGSEGV. One readable page lies below it,
// whose last eight bytes hold `bytes`, as MLX's CPU allocator keeps a buffer's size. Below that
// lies a page whose only use is that it is a mapping of its own:
//
//   | spare page, read only | header page | reserved addresses ...
//                                         ^ base
//
// Where a process has as many mappings as the system allows, even a call that would leave fewer of
// them is refused. Giving the spare up makes one less, so that what was begun can be undone.
std::byte* reserve_addresses(size_t bytes);
void release_addresses(std::byte* base, size_t bytes);
void give_up_spare(std::byte* base);
bool make_spare(std::byte* base);  // false where no mapping is left

// A write to what is not writable is SIGSEGV.
void map_shared(void* address, size_t bytes, int fd, size_t offset, bool writable);
// Commits the memory behind a writable mapping, so that the first write takes no page fault. Where
// the system cannot, or has no memory, the mapping stands as it was and faults come later.
void populate(void* address, size_t bytes) noexcept;
void map_private_zeros(void* address, size_t bytes);  // readable, writable, committed on touch
void map_nothing(void* address, size_t bytes);        // back to reserved
// Gives the memory behind private zeros back to the system; later reads give zeros.
void give_back_private(void* address, size_t bytes);
// How many bytes of private zeros are in memory, in whole pages.
size_t private_committed(void* address, size_t bytes);

}  // namespace quire
