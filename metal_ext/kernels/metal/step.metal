// The last command of a step: what it writes is there when all commands before it have run.
#include <metal_stdlib>

using namespace metal;

// One thread.
[[kernel]] void mark_step(
    device ulong* epoch [[buffer(0)]],
    constant ulong& value [[buffer(1)]]) {
  *epoch = value;
}
