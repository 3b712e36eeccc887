#include "rows.h"

#include <cstring>

namespace quire::metal {
namespace {

uint64_t word(uint64_t stamp, size_t region, size_t position) {
  uint64_t x = stamp * 0x9e3779b97f4a7c15 + region * 0xbf58476d1ce4e5b9 + position;
  x = (x ^ x >> 31) * 0x94d049bb133111eb;
  return x ^ x >> 29;
}

// The first, a middle and the last word of a row stand for it.
std::vector<size_t> probes(size_t row_bytes) {
  const size_t words = row_bytes / sizeof(uint64_t);
  return {0, words / 2, words - 1};
}

void check_row(
    const RowPlaces& places, const Geometry& geometry, size_t region, size_t position,
    uint64_t expected, const char* what, std::vector<std::string>& mistakes) {
  const auto* const row = reinterpret_cast<const uint64_t*>(places.address(region, position));
  for (const size_t i : probes(geometry.row_bytes(region))) {
    if (row[i] != expected) {
      mistakes.push_back(
          "row " + std::to_string(position) + " of region " + std::to_string(region) + " " + what);
      return;
    }
  }
}

}  // namespace

RowPlaces::RowPlaces(const KVBackend& kv_backend, AddressRange& range, size_t tokens)
    : geometry_(kv_backend.geometry()) {
  const size_t per_block = geometry_.tokens_per_block();
  if (kv_backend.kind() == Kind::paged) {
    pages_ = kv_backend.own(range).page_addresses((tokens + per_block - 1) / per_block);
  }
  for (size_t region = 0; region < geometry_.regions(); ++region) {
    const RegionPlace place = kv_backend.place(region);
    offsets_.push_back(place.offset);
    uint64_t base = kv_backend.own(range).row_base(place.buffer);
    if (kv_backend.kind() == Kind::dense) {
      base += kv_backend.own(range).view(region).buffer->gpuAddress();
    }
    regions_.push_back(base + place.offset);
  }
}

uint64_t RowPlaces::address(size_t region, size_t position) const {
  const size_t row_bytes = geometry_.row_bytes(region);
  if (pages_.empty()) {
    return regions_[region] + position * row_bytes;
  }
  const size_t per_block = geometry_.tokens_per_block();
  return pages_.at(position / per_block) + offsets_[region] + position % per_block * row_bytes;
}

void RowPlaces::add_accesses(
    size_t first, size_t end, bool write, std::vector<fake::Access>& accesses) const {
  const size_t per_block = geometry_.tokens_per_block();
  for (size_t region = 0; region < geometry_.regions(); ++region) {
    for (size_t position = first; position < end;) {
      const size_t stop = std::min(end, (position / per_block + 1) * per_block);
      accesses.push_back(
          {address(region, position), (stop - position) * geometry_.row_bytes(region), write});
      position = stop;
    }
  }
}

std::vector<fake::Access> accesses_of(const KVBackend& kv_backend, const Segment& segment) {
  const size_t end = segment.start + segment.stamps.size();
  const RowPlaces places(kv_backend, *segment.range, end);
  std::vector<fake::Access> accesses;
  places.add_accesses(0, segment.start, false, accesses);
  places.add_accesses(segment.start, end, true, accesses);
  return accesses;
}

void run_segment(
    const RowPlaces& places, const Geometry& geometry, const Segment& segment,
    std::vector<std::string>& mistakes) {
  for (size_t region = 0; region < geometry.regions(); ++region) {
    for (size_t position = 0; segment.checked && position < segment.start; ++position) {
      check_row(places, geometry, region, position,
                word(segment.before[position], region, position),
                "does not hold what was written", mistakes);
    }
    for (size_t i = 0; i < segment.stamps.size(); ++i) {
      const size_t position = segment.start + i;
      if (segment.checked) {
        check_row(places, geometry, region, position, 0, "was not zero at first", mistakes);
      }
      auto* const row = reinterpret_cast<uint64_t*>(places.address(region, position));
      std::fill_n(row, geometry.row_bytes(region) / sizeof(uint64_t),
                  word(segment.stamps[i], region, position));
    }
  }
}

void check_rows(
    const RowPlaces& places, const Geometry& geometry, const std::vector<uint64_t>& stamps,
    size_t zeros_until, std::vector<std::string>& mistakes) {
  for (size_t region = 0; region < geometry.regions(); ++region) {
    for (size_t position = 0; position < zeros_until; ++position) {
      const bool written = position < stamps.size();
      check_row(places, geometry, region, position,
                written ? word(stamps[position], region, position) : 0,
                written ? "does not hold what was written" : "is not zero", mistakes);
    }
  }
}

}  // namespace quire::metal
