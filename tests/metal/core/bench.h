#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/metal/kv_backend.h"
#include "fake/fake_metal.h"
#include "rows.h"

namespace quire::metal {

// Small blocks: 16 tokens, one page per region and kilobyte of row.
Geometry small_geometry(Kind kind, std::vector<int64_t> row_bytes = {1024, 1024, 1024, 1024});

// A machine, a backend on it, and a queue on which steps run as MLX's do.
class Bench {
 public:
  explicit Bench(
      Kind kind, fake::Options options = {}, KVBackend::Options shape = default_shape());
  // Shuts down what is left, and fails the test where the machine found something.
  ~Bench() noexcept(false);

  // Mappings change beside steps, and the machine lets them.
  static KVBackend::Options default_shape();
  // They do not, and the machine reports where they do.
  static KVBackend::Options quiet_shape();

  struct Step {
    uint64_t epoch;
    NS::SharedPtr<MTL::CommandBuffer> commands;
  };
  // Opens an epoch, encodes what the segments say, and commits. Where use() throws, the epoch is
  // abandoned.
  Step step(const std::vector<Segment>& segments);

  KVBackend& metal() { return *kv_backend; }
  // Everything that steps and machine found wrong, and forgets it.
  std::vector<std::string> take_mistakes();
  void require_no_mistakes();
  // Ends all in order, and checks that nothing is left.
  void end();
  // For tests in which the device stops answering: nothing is checked any more.
  void give_up() { given_up_ = true; }

  fake::Machine machine;
  NS::SharedPtr<MTL::Device> device;
  std::shared_ptr<KVBackend> kv_backend;
  NS::SharedPtr<MTL::CommandQueue> queue;

 private:
  // Under machine.mutex. Steps that still run keep it.
  std::shared_ptr<std::vector<std::string>> mistakes_ =
      std::make_shared<std::vector<std::string>>();
  bool given_up_ = false;
};

}  // namespace quire::metal
