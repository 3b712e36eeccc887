#pragma once

#include <Metal/Metal.hpp>

#include <functional>
#include <string>
#include <vector>

#include "machine.h"

// What tests that hold metal-cpp's objects need beyond metal-cpp.
namespace quire::fake {

// The machine's GPU.
NS::SharedPtr<MTL::Device> new_device();

// A command that a test stands in for: it touches these parts of memory, and does this when it
// runs. For work such as MLX's, on a queue and in a command buffer of the test's. used: what it
// binds, or tells its encoder that it uses.
void encode(
    MTL::CommandBuffer* commands, const std::string& what, std::vector<Access> accesses,
    std::function<void()> body, const std::vector<MTL::Resource*>& used = {});

}  // namespace quire::fake
