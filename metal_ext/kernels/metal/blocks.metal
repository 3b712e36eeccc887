// Zeroes or copies blocks of K and V. Runs on (bytes / 16, regions) threads, each for 16 bytes.
#include "rows.h"

[[kernel]] void zero_blocks(
    constant BlockArguments& arguments [[buffer(0)]],
    uint2 at [[thread_position_in_grid]]) {
  const ulong byte = ulong(at.x) * 16;
  if (byte >= arguments.bytes || at.y >= arguments.regions) {
    return;
  }
  device uint4* target = reinterpret_cast<device uint4*>(
      arguments.target + at.y * arguments.target_stride + byte);
  *target = uint4(0);
}

[[kernel]] void copy_blocks(
    constant BlockArguments& arguments [[buffer(0)]],
    uint2 at [[thread_position_in_grid]]) {
  const ulong byte = ulong(at.x) * 16;
  if (byte >= arguments.bytes || at.y >= arguments.regions) {
    return;
  }
  const device uint4* source = reinterpret_cast<const device uint4*>(
      arguments.source + at.y * arguments.source_stride + byte);
  device uint4* target = reinterpret_cast<device uint4*>(
      arguments.target + at.y * arguments.target_stride + byte);
  *target = *source;
}
