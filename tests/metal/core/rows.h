#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/metal/kv_backend.h"
#include "fake/machine.h"

namespace quire::metal {

// What a step does to one sequence: reads rows [0, start) and writes as many as there are stamps. A
// row's stamp says whose it is: every word of it is made from the stamp, the region and the
// position. `before` has the stamps of the rows that are read.
struct Segment {
  AddressRange* range;
  size_t start;
  std::vector<uint64_t> before;
  std::vector<uint64_t> stamps;
  bool checked = true;  // false where an earlier step is to fail: nobody knows what is there
};

// Where the rows of a sequence stand at the time when a step is encoded, as kernels would be told.
class RowPlaces {
 public:
  RowPlaces(const KVBackend& kv_backend, AddressRange& range, size_t tokens);

  uint64_t address(size_t region, size_t position) const;
  // Parts of the device's memory that hold rows [first, end) in all regions.
  void add_accesses(
      size_t first, size_t end, bool write, std::vector<fake::Access>& accesses) const;

 private:
  Geometry geometry_;
  std::vector<uint64_t> regions_;  // sparse, dense: where each begins
  std::vector<uint64_t> pages_;    // paged
  std::vector<uint64_t> offsets_;  // paged: of each region behind a page's address
};

// What a step touches.
std::vector<fake::Access> accesses_of(const KVBackend& kv_backend, const Segment& segment);

// Runs in the device: checks what is read and that what is written was zero, and writes. Mistakes
// are added in words.
void run_segment(
    const RowPlaces& places, const Geometry& geometry, const Segment& segment,
    std::vector<std::string>& mistakes);

// Checks rows from the host, at rest: `stamps` from position 0 on, then zeros up to `zeros_until`.
void check_rows(
    const RowPlaces& places, const Geometry& geometry, const std::vector<uint64_t>& stamps,
    size_t zeros_until, std::vector<std::string>& mistakes);

}  // namespace quire::metal
