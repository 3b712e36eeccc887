#pragma once

#include <Metal/Metal.hpp>

#include <array>
#include <cstddef>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "fake/commands.h"
#include "mlx/array.h"
#include "timeline.h"

// The Metal objects that MLX's encoder holds, as far as quire's operations and metal-cpp's inline
// functions ask them. They keep what is encoded until a dispatch takes it; what runs is handed to
// MLX's CPU stream (stream_work.h), so that it stands in one order with MLX's own work.
namespace quire::graph {

template <class Metal>
Metal* as_metal(fake::Object* object) {
  return reinterpret_cast<Metal*>(object);
}
template <class T>
T& from_metal(const void* object) {
  return static_cast<T&>(*static_cast<fake::Object*>(const_cast<void*>(object)));
}

// Signalled when an encoder has run.
class Fence final : public fake::Object {
 public:
  explicit Fence(Encoder encoder) : Object("GraphFence"), encoder(encoder) {}
  const Encoder encoder;
};

// What is bound for the next command.
struct Binding {
  void* address = nullptr;
  std::shared_ptr<mlx::core::array::Data> data;  // of an array
  size_t data_bytes = 0;                         // from the address on
  std::vector<std::byte> bytes;                  // or a copy of so much
};

class ComputeEncoder final : public fake::Object {
 public:
  static constexpr size_t kBindings = 31;

  explicit ComputeEncoder(Encoder encoder) : Object("GraphComputeEncoder"), encoder(encoder) {}

  // --- what metal-cpp sends ---------------------------------------------------------------------
  void set_pipeline(fake::Pipeline* pipeline);
  void set_bytes(const void* bytes, uint64_t count, uint64_t index);
  void use_resources(fake::Buffer* const* resources, uint64_t count, uint64_t usage);

  const Encoder encoder;
  fake::Pipeline* pipeline = nullptr;
  std::array<Binding, kBindings> bindings;
  std::set<std::pair<const void*, const void*>> used;  // buffers, and whose they were then
  std::set<const fake::Allocation*> told;  // that it uses, without binding them
};

class CommandBuffer final : public fake::Object {
 public:
  explicit CommandBuffer(fake::CommandQueue* queue) : Object("GraphCommandBuffer"), queue_(queue) {}

  // --- what metal-cpp sends ---------------------------------------------------------------------
  fake::Object* command_queue();
  void encode_signal(fake::Event* event, uint64_t value);

  fake::CommandQueue* queue() const { return queue_; }
  std::set<Encoder> encoders;  // that have ended

 private:
  fake::CommandQueue* const queue_;
};

}  // namespace quire::graph
