#pragma once

#include <Metal/Metal.hpp>

#include <chrono>
#include <cstdint>

namespace quire::metal {

// Throws std::system_error(ENOMEM) where the device refuses.
NS::SharedPtr<MTL::SharedEvent> make_shared_event(MTL::Device* device);

// False when the time passed before the event had that value.
bool wait_for_value(
    MTL::SharedEvent* event, uint64_t value, std::chrono::nanoseconds timeout);

}  // namespace quire::metal
