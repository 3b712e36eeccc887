#pragma once

#include <Metal/Metal.hpp>

#include <mutex>
#include <unordered_map>
#include <vector>

namespace quire::metal {

// One residency set for all memory that kernels reach by address, on every queue on which something
// runs that may touch it: the system cannot see such uses. Where there are no residency sets (macOS
// 14), a list of what encoders must name. Any thread: the set itself may be used by one at a time.
class Residency {
 public:
  // supported: Capabilities::residency_sets. Throws std::system_error(ENOMEM) where the device
  // refuses.
  Residency(MTL::Device* device, bool supported);
  ~Residency() { end(); }

  // Resident when it returns, on all queues.
  void add(MTL::Buffer* buffer);
  void add(MTL::Heap* heap);
  // Before the last reference to it goes. Nothing that runs may need it any more.
  void remove(MTL::Buffer* buffer);
  void remove(MTL::Heap* heap);
  // Once per queue, then free.
  void attach(MTL::CommandQueue* queue);
  void attach(MTL4::CommandQueue* queue);
  // Off all queues, and empty.
  void end();

  // Without residency sets, the buffers that a compute encoder must be told to use; else empty.
  std::vector<MTL::Resource*> unattached() const;

 private:
  void insert(const MTL::Allocation* allocation);
  void erase(const MTL::Allocation* allocation);
  template <class Queue>
  void attach_to(Queue* queue, std::unordered_map<Queue*, NS::SharedPtr<Queue>>& attached);

  mutable std::mutex mutex_;
  NS::SharedPtr<MTL::ResidencySet> set_;  // null where there are none
  std::unordered_map<MTL::CommandQueue*, NS::SharedPtr<MTL::CommandQueue>> queues_;
  std::unordered_map<MTL4::CommandQueue*, NS::SharedPtr<MTL4::CommandQueue>> mapping_queues_;
  std::vector<MTL::Resource*> unattached_;
};

}  // namespace quire::metal
