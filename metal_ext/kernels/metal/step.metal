// The last command of a step. It writes the step's number after all earlier commands have run.
#include <metal_stdlib>

using namespace metal;

[[kernel]] void mark_step(
    device ulong* epoch [[buffer(0)]],
    constant ulong& value [[buffer(1)]]) {
  *epoch = value;
}
