#pragma once

#include <Metal/Metal.hpp>

#include <array>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "events.h"
#include "library.h"
#include "memory.h"
#include "residency_set.h"
#include "work_queue.h"

namespace quire::fake {

class CommandBuffer;

// A classic queue.
class CommandQueue final : public WorkQueue {
 public:
  CommandQueue() : WorkQueue("MTLCommandQueue") {}

  Object* command_buffer();
  Object* unretained_command_buffer();
  void add_residency(ResidencySet* set) { residency_.add(set); }
  void remove_residency(ResidencySet* set) { residency_.remove(set); }
  const QueueResidency& residency() const { return residency_; }

 protected:
  void dealloc() override;

 private:
  QueueResidency residency_;
};

// Commands, run in order when the queue comes to them.
class CommandBuffer final : public Object {
 public:
  CommandBuffer(CommandQueue* queue, bool retains);

  Object* compute_encoder();
  void encode_signal(Event* event, uint64_t value);
  void commit();
  void wait_until_completed();
  uint64_t status() const;
  Object* error() const;

  // One command: what it touches, and what it does. Buffers that are bound need no residency set.
  void encode(
      const std::string& what, std::vector<Access> accesses, std::function<void()> body,
      std::set<const Allocation*> bound = {});
  // Keeps the object until the command has run; an unretained buffer only remembers it.
  void use(Object* object);

  // --- while it is in flight, under the machine's mutex ----------------------------------------
  bool uses(const Object* object) const;
  // By address, as far as anybody can know: what is in a set of its queue.
  bool may_touch(const Allocation* memory) const;
  bool reaches(const Buffer* buffer, uint64_t page) const;
  bool writes(const Allocation* memory, uint64_t page) const;
  bool stages(const Buffer* buffer) const;  // copies from or to memory that the CPU has, too
  bool has(const ResidencySet* set) const;  // its queue had it when it was committed

 protected:
  void dealloc() override;

 private:
  struct Command {
    std::string what;
    std::vector<Access> accesses = {};
    std::function<void()> body = nullptr;
    std::set<const Allocation*> bound = {};
    Event* event = nullptr;  // to signal
    uint64_t value = 0;
  };

  void check();  // what the commands touch, when they are committed
  void check_staged(const std::string& what, uint64_t bytes, const Touched& first);
  void check_mappings() const;
  void check_page(const std::string& what, const Touched& page) const;
  void check_residency(const Command& command, const Touched& page) const;
  void enqueue(const Command& command, bool last);
  void run(const Command& command);
  void leave();  // it is no longer in flight
  void complete();
  bool editable(const char* what) const;

  CommandQueue* const queue_;
  const bool retains_;
  uint64_t status_ = 0;
  std::vector<Command> commands_;
  std::vector<Touched> touched_;
  std::set<ResidencySet*> sets_;
  std::set<const Buffer*> staged_;
  uint64_t staged_bytes_ = 0;
  std::vector<Object*> used_;
  std::string failure_;
};

// An encoder of compute commands.
class ComputeEncoder final : public Object {
 public:
  explicit ComputeEncoder(CommandBuffer* commands)
      : Object("MTLComputeCommandEncoder"), commands_(commands) {}

  void set_pipeline(Pipeline* pipeline);
  void set_bytes(const void* bytes, uint64_t length, uint64_t index);
  void dispatch_threadgroups(MTL::Size grid, MTL::Size threads);
  void end();

 private:
  static constexpr size_t kBindings = 31;

  CommandBuffer* commands_;
  Pipeline* pipeline_ = nullptr;
  std::array<std::vector<std::byte>, kBindings> bytes_;
};

}  // namespace quire::fake
