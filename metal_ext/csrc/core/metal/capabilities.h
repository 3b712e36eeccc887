#pragma once
#include <Metal/Metal.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/metal/kernel_text.h"

namespace quire::metal {

// Throws std::invalid_argument that lists the names.
Kind kind_named(const std::string& name);

// What a device can do, asked of the device itself and never read off a version of the system: a
// virtual machine's device lacks what its system has.
struct Capabilities {
  // Makes a queue, an event and the like, asks them, and lets go of them.
  static Capabilities probe(MTL::Device* device);

  std::string name;
  std::vector<std::string> families;  // "apple7", "metal3", ...
  uint64_t max_buffer_bytes = 0;
  uint64_t recommended_working_set_bytes = 0;
  bool unified_memory = false;
  bool residency_sets = false;
  // What the device says of itself; nothing where the system is too old to be asked.
  std::optional<bool> placement_sparse;
  // What objects of this device do not answer, or the device does not make, in words.
  struct Missing {
    Kind needed_by;
    std::string what;
  };
  std::vector<Missing> missing;

  // Everything that a substrate of this kind needs and that is not there; empty where it can be
  // tried.
  std::vector<std::string> missing_for(Kind kind) const;
};

}  // namespace quire::metal
