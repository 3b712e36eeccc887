#include "core/state_memory.h"

#include <stdexcept>
#include <string>
#include <system_error>

#include "core/checked.h"
#include "core/posix_memory.h"

namespace quire {
namespace {

size_t whole_pages(int64_t bytes) {
  const size_t page = system_page_bytes();
  const size_t least = checked_between("bytes", bytes, 1, StateMemory::kMaxBytes);
  return (least + page - 1) / page * page;
}

}  // namespace

// The page behind it stays without memory: a write beyond the end is SIGSEGV.
StateMemory::StateMemory(int64_t bytes)
    : bytes_(whole_pages(bytes)), address_(reserve_addresses(bytes_ + system_page_bytes())) {
  try {
    map_private_zeros(address_, bytes_);
  } catch (const std::system_error&) {
    release_addresses(address_, bytes_ + system_page_bytes());
    throw;
  }
}

StateMemory::~StateMemory() {
  release_addresses(address_, bytes_ + system_page_bytes());
}

std::byte* StateMemory::pages_at(int64_t offset, int64_t bytes) const {
  checked_run("bytes of the memory", offset, bytes, bytes_);
  const auto page = static_cast<int64_t>(system_page_bytes());
  if (offset % page != 0 || bytes % page != 0) {
    throw std::invalid_argument(
        "[" + std::to_string(offset) + ", " + std::to_string(offset) + " + " +
        std::to_string(bytes) + ") is not in whole pages of " + std::to_string(page) + " bytes");
  }
  return address_ + offset;
}

void StateMemory::release(int64_t offset, int64_t bytes) {
  give_back_private(pages_at(offset, bytes), static_cast<size_t>(bytes));
}

size_t StateMemory::committed(int64_t offset, int64_t bytes) const {
  return private_committed(pages_at(offset, bytes), static_cast<size_t>(bytes));
}

}  // namespace quire
