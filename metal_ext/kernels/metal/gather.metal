// Copies the K and V of a sequence's consecutive tokens into contiguous arrays.
#include "rows.h"

// Runs on (row_elements / 4, tokens) threads. keys and values are [tokens][row_elements].
template <typename KV, Rows kind>
[[kernel]] void gather(
    const device RowEntry* rows [[buffer(0)]],
    const device ulong* pages [[buffer(1)]],
    device uchar* arena [[buffer(2)]],
    device KV* keys [[buffer(3)]],
    device KV* values [[buffer(4)]],
    constant GatherArguments& arguments [[buffer(5)]],
    uint2 at [[thread_position_in_grid]]) {
  const uint element = at.x * 4;
  if (element >= arguments.row_elements || at.y >= arguments.tokens) {
    return;
  }
  const RowSpace space = {pages, arena};
  const RowEntry row = rows[arguments.row];
  constant LayerPlace& place = arguments.place;
  const uint token = arguments.first + at.y;
  const device KV* key = reinterpret_cast<const device KV*>(
      kv_row<kind>(space, row, place, place.key_offset, token));
  const device KV* value = reinterpret_cast<const device KV*>(
      kv_row<kind>(space, row, place, place.value_offset, token));
  const ulong target = ulong(at.y) * arguments.row_elements + element;
  *reinterpret_cast<device vec<KV, 4>*>(keys + target) = load<4>(key + element);
  *reinterpret_cast<device vec<KV, 4>*>(values + target) = load<4>(value + element);
}
