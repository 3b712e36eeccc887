#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "machine.h"
#include "object.h"
#include "system_memory.h"

namespace quire::fake {

class Event;

// Bytes of a page size as Metal numbers them (101, 102, 103); 0 for what is none.
uint64_t page_bytes_of(int64_t sparse_page_size);

class HeapDescriptor final : public Object {
 public:
  HeapDescriptor() : Object("MTLHeapDescriptor") {}
  void set_type(int64_t type) { this->type = type; }
  void set_storage_mode(uint64_t mode) { storage_mode = mode; }
  void set_hazard_tracking(uint64_t mode) { hazard_tracking = mode; }
  void set_size(uint64_t bytes) { size = bytes; }
  void set_page_size(int64_t size) { page_size = size; }

  int64_t type = 0;
  uint64_t storage_mode = 0;
  uint64_t hazard_tracking = 0;
  uint64_t size = 0;
  int64_t page_size = 0;
};

// What residency sets hold: heaps and buffers.
class Allocation : public Object {
 public:
  Allocation(const char* class_name, uint64_t bytes) : Object(class_name), bytes_(bytes) {}
  uint64_t length() const { return bytes_; }

  int in_residency_sets = 0;
  int queued = 0;  // mapping operations of it that have not been done

 protected:
  // Reports what may not be while it goes: a set that holds it, a command that uses it.
  void check_release() const;

 private:
  const uint64_t bytes_;
};

// A placement heap. A page of it may stand behind several places of buffers.
class Heap final : public Allocation {
 public:
  explicit Heap(const HeapDescriptor& descriptor);

  const MemoryFile& memory() const { return *memory_; }
  uint64_t page_bytes() const { return page_bytes_; }
  uint64_t pages() const { return length() / page_bytes_; }

  std::map<uint64_t, std::set<uint64_t>> addresses_of_page;

 protected:
  void dealloc() override;

 private:
  const uint64_t page_bytes_;
  std::unique_ptr<MemoryFile> memory_;
};

// A buffer: plain, with memory of its own, or sparse, with pages of heaps behind its addresses. The
// GPU address is an address of this process, where kernels run; the CPU's contents() are another.
class Buffer final : public Allocation {
 public:
  // What stands behind a page of a sparse buffer. The host has seen it when the event has been seen
  // at that value.
  struct Page {
    Heap* heap;
    uint64_t heap_page;
    const Event* event = nullptr;
    uint64_t value = 0;
    bool leaving = false;  // an unmap of it is queued
  };

  Buffer(uint64_t bytes, uint64_t options);                       // plain
  Buffer(uint64_t bytes, uint64_t options, uint64_t page_bytes);  // sparse

  uint64_t gpu_address() const { return addresses_->first(); }
  std::byte* contents();
  bool sparse() const { return page_bytes_ != 0; }
  Object* heap() const { return nullptr; }  // that it lies in: placement heaps have none
  uint64_t page_bytes() const { return page_bytes_; }

  // Under the machine's mutex. They report what cannot be, and then do not do it.
  void map(uint64_t page, Heap& heap, uint64_t heap_page);
  void unmap(uint64_t page);

  std::map<uint64_t, Page> pages;

 protected:
  void dealloc() override;

 private:
  const uint64_t options_;
  const uint64_t page_bytes_ = 0;
  std::unique_ptr<MemoryFile> memory_;  // plain
  std::unique_ptr<Addresses> addresses_;
};

// A page that a command touches, by the address that it does so through.
struct Touched {
  Buffer* buffer;
  uint64_t page;  // of the buffer
  Allocation* memory;
  uint64_t memory_page;
  bool write;
};

// Which pages an access touches. Reports addresses that are no buffer's, and pages that have
// nothing behind them, or something whose mapping the host has not seen, or is about to lose it.
std::vector<Touched> touched_by(const Access& access, const std::string& who);

}  // namespace quire::fake
