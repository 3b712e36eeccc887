#pragma once

#include <cstddef>

// System calls for ranges and heaps in the CPU's memory. All functions but populate() throw
// std::system_error with the name of the call.
namespace quire {

size_t system_page_bytes();

// Opens a shared-memory file, at first without memory: a memfd, or on a Mac an unlinked shm object.
int create_shared_memory(size_t bytes);
void close_shared_memory(int fd);

// Returns how many bytes the system counts as used: st_blocks on Linux, all bytes on a Mac.
size_t shared_memory_committed(int fd);

// True if a part of a shared-memory file can be given back to the system.
#ifdef __linux__
constexpr bool kPunchesHoles = true;
#else
constexpr bool kPunchesHoles = false;
#endif
// Gives the memory of [offset, offset + bytes) back to the system. Later reads give zeros.
void punch_hole(int fd, size_t offset, size_t bytes);

// Reserves addresses without memory. The last eight bytes of the header page hold `bytes`, because
// MLX's CPU allocator stores a size there, too. When the system allows no more mappings, giving up
// the spare page frees one. With this mapping, a change that failed half-way can be undone.
//   | spare page, read only | header page, readable | reserved addresses: any access is SIGSEGV ...
//                                                   ^ base
std::byte* reserve_addresses(size_t bytes);
void release_addresses(std::byte* base, size_t bytes);
void give_up_spare(std::byte* base);
bool make_spare(std::byte* base);  // returns false when no mapping is left

// Maps a part of a file. Writing to a read-only mapping raises SIGSEGV.
void map_shared(void* address, size_t bytes, int fd, size_t offset, bool writable);
// Tries to commit a writable mapping's memory. On failure, first writes take page faults.
void populate(void* address, size_t bytes) noexcept;
void map_private_zeros(void* address, size_t bytes);  // committed by the first write
void map_nothing(void* address, size_t bytes);        // only reserves the addresses again
// Gives memory from map_private_zeros() back to the system. Later reads give zeros.
void give_back_private(void* address, size_t bytes);
// Returns how many bytes from map_private_zeros() are committed, counted in whole pages.
size_t private_committed(void* address, size_t bytes);

}  // namespace quire
