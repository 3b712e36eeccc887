// Writes the K and V of a step's tokens (rows) to the addresses that the row table gives.
#include "rows.h"

// Runs on (row_elements / 4, rows) threads. keys and values are [rows][row_elements].
template <typename T, typename KV, Rows kind>
[[kernel]] void append(
    const device T* keys [[buffer(0)]],
    const device T* values [[buffer(1)]],
    const device RowEntry* rows [[buffer(2)]],
    const device ulong* pages [[buffer(3)]],
    device uchar* arena [[buffer(4)]],
    constant AppendArguments& arguments [[buffer(5)]],
    uint2 at [[thread_position_in_grid]]) {
  const uint element = at.x * 4;
  if (element >= arguments.row_elements || at.y >= arguments.rows) {
    return;
  }
  const RowSpace space = {pages, arena};
  const RowEntry row = rows[at.y];
  constant LayerPlace& place = arguments.place;
  device KV* key = reinterpret_cast<device KV*>(
      kv_row<kind>(space, row, place, place.key_offset, row.position));
  device KV* value = reinterpret_cast<device KV*>(
      kv_row<kind>(space, row, place, place.value_offset, row.position));
  const ulong source = ulong(at.y) * arguments.row_elements + element;
  store<4>(key + element, as_floats<4, T>(load<4>(keys + source)));
  store<4>(value + element, as_floats<4, T>(load<4>(values + source)));
}
