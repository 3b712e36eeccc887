#pragma once

#include "memory.h"

namespace quire::fake {

class Device final : public Object {
 public:
  Device() : Object("MTLDevice") {}

  Object* device_name() const;
  uint64_t max_buffer_bytes() const { return Machine::current().options().max_buffer_bytes; }
  uint64_t working_set_bytes() const { return Machine::current().options().working_set_bytes; }
  bool unified_memory() const { return Machine::current().options().unified_memory; }
  bool placement_sparse() const { return Machine::current().options().placement_sparse; }
  bool supports_family(int64_t family) const;

  Object* new_buffer(uint64_t bytes, uint64_t options);
  Object* new_sparse_buffer(uint64_t bytes, uint64_t options, int64_t page_size);
  Object* new_heap(HeapDescriptor* descriptor);
  Object* new_queue();
  Object* new_mapping_queue();
  Object* new_event();
  Object* new_residency_set(Object* descriptor, Object** error);
  Object* new_library(Object* text, Object* options, Object** error);
  Object* new_pipeline(Object* function, Object** error);
};

}  // namespace quire::fake
