#include "accesses.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "metal/arguments.h"

namespace quire::graph {
namespace {

using namespace quire::metal;

bool begins(const std::string& kernel, const char* family) {
  return kernel.rfind(family, 0) == 0;
}

// The rows' three bindings, from `first` on, and the layer that lies in them.
class Rows {
 public:
  Rows(const std::string& kernel, void* const* buffers, int first, const LayerPlace& place)
      : kind_(kernel.substr(kernel.rfind('_') + 1)),
        entries_(static_cast<const RowEntry*>(buffers[first])),
        pages_(static_cast<const uint64_t*>(buffers[first + 1])),
        arena_(reinterpret_cast<uint64_t>(buffers[first + 2])),
        place_(place) {}

  const RowEntry& entry(size_t row) const { return entries_[row]; }

  // Tokens [first, + count) of the row's sequence, keys and values.
  void touch(size_t row, uint32_t first, uint32_t count, bool write) {
    for (const uint64_t region : {place_.key_offset, place_.value_offset}) {
      for (uint32_t token = first; token < first + count;) {
        const uint32_t run = kind_ == "paged" ? std::min(first + count - token,
                                                         block_tokens() - token % block_tokens())
                                              : first + count - token;
        touched.push_back(
            {address(entries_[row], region, token), uint64_t{run} * place_.row_bytes, write});
        token += run;
      }
    }
  }

  std::vector<Touch> touched;

 private:
  uint32_t block_tokens() const { return 1u << place_.block_shift; }

  uint64_t address(const RowEntry& entry, uint64_t region, uint32_t token) const {
    const uint64_t bytes = place_.row_bytes;
    if (kind_ == "paged") {
      const uint64_t block = pages_[entry.first_page + token / block_tokens()];
      return block + region + token % block_tokens() * bytes;
    }
    const uint64_t start = kind_ == "dense" ? arena_ + entry.base : entry.base;
    return start + region + token * bytes;
  }

  const std::string kind_;
  const RowEntry* const entries_;
  const uint64_t* const pages_;
  const uint64_t arena_;
  const LayerPlace place_;
};

// A kernel's name says what numbers it computes with, then its heads' dimensions.
uint64_t number_bytes(const std::string& kernel) {
  return kernel.find("_float_") != kernel.npos ? 4 : 2;
}

// A kernel over states: where slots and arguments are bound, and what it touches of slots, matrices
// or the tails behind them.
struct DeltaKernel {
  const char* family;
  int slots;
  int arguments;
  bool matrices;  // reads and writes them
  bool reads_tails;
  bool writes_tails;
};
constexpr DeltaKernel kDeltaKernels[] = {
    {"delta_prepare_", 6, 11, false, true, false},
    {"delta_scan_", 2, 5, true, false, false},
    {"delta_finish_", 4, 8, false, true, true}};

class Slots {
 public:
  Slots(const std::string& kernel, void* const* buffers, int first, const DeltaArguments& its)
      : begun_(static_cast<const DeltaSegment*>(buffers[first])),
        written_(static_cast<const DeltaWrite*>(buffers[first + 1])),
        arena_(kernel.ends_with("_dense") ? reinterpret_cast<uint64_t>(buffers[first + 2]) : 0),
        its_(its),
        matrices_(uint64_t{its.value_heads} * kDim * kDim * sizeof(float)),
        tails_(uint64_t{its.tail_rows} * (2 * its.key_heads + its.value_heads) * kDim *
               number_bytes(kernel)) {}

  void touch(const DeltaKernel& kernel) {
    for (uint32_t s = 0; s < its_.segments; ++s) {
      const DeltaSegment& segment = begun_[s];
      if (segment.reads != 0 && kernel.matrices) {
        add(segment.read, 0, matrices_, false);
      }
      if (segment.reads != 0 && kernel.reads_tails) {
        add(segment.read, matrices_, tails_, false);
      }
      for (uint32_t w = segment.first_write; w < segment.first_write + segment.writes; ++w) {
        if (kernel.matrices) {
          add(written_[w].slot, 0, matrices_, true);
        }
        if (kernel.writes_tails) {
          add(written_[w].slot, matrices_, tails_, true);
        }
      }
    }
  }

  std::vector<Touch> touched;

 private:
  static constexpr uint64_t kDim = 128;

  void add(uint64_t slot, uint64_t first, uint64_t bytes, bool write) {
    touched.push_back({arena_ + slot + its_.offset + first, bytes, write});
  }

  const DeltaSegment* const begun_;
  const DeltaWrite* const written_;
  const uint64_t arena_;
  const DeltaArguments its_;
  const uint64_t matrices_;
  const uint64_t tails_;
};

template <class Arguments>
const Arguments& arguments_at(void* const* buffers, int index) {
  return *static_cast<const Arguments*>(buffers[index]);
}

std::vector<Touch> own_rows(
    const std::string& kernel, void* const* buffers, int first, const LayerPlace& place,
    uint32_t count) {
  Rows rows(kernel, buffers, first, place);
  for (uint32_t row = 0; row < count; ++row) {
    rows.touch(row, rows.entry(row).position, 1, true);
  }
  return rows.touched;
}

std::vector<Touch> decode_reads(
    const std::string& kernel, void* const* buffers, uint64_t tasks) {
  const auto& arguments = arguments_at<AttentionArguments>(buffers, 8);
  Rows rows(kernel, buffers, 2, arguments.place);
  const auto* const task = static_cast<const DecodeTask*>(buffers[1]);
  for (uint64_t i = 0; i < tasks; ++i) {
    const uint32_t row = arguments.first_row + task[i].row;
    const uint32_t position = rows.entry(row).position;
    const uint32_t begin = first_seen(position, arguments.window);
    const uint32_t most = split_tokens(position - begin);
    const uint32_t first = begin + task[i].split * most;
    const uint32_t end = std::min(first + most, position + 1);
    rows.touch(row, first, end - first, false);
  }
  return rows.touched;
}

}  // namespace

const Bindings& bindings_of(const std::string& kernel) {
  static const std::vector<std::pair<const char*, Bindings>> families{
      {"append_", {6, {}}},              {"project_append_", {10, {8}}},
      {"decode_split_", {10, {5, 6, 7}}}, {"decode_combine_", {6, {3}}},
      {"gather_", {6, {3, 4}}},          {"mix_", {6, {4}}},
      {"delta_prepare_", {12, {9, 10}}}, {"delta_scan_", {6, {0}}},
      {"delta_finish_", {9, {7}}},
      {"mark_step", {2, {0}}},           {"products_", {23, {17, 18, 19, 20}}},
      {"gated_product_", {9, {7}}},      {"route_", {5, {1, 2, 3}}},
      {"expert_gates_", {19, {17}}},     {"expert_downs_", {12, {10}}}};
  for (const auto& [family, bindings] : families) {
    if (begins(kernel, family)) {
      return bindings;
    }
  }
  throw std::logic_error("what " + kernel + " is bound to is not known");
}

std::vector<Touch> rows_touched(
    const std::string& kernel, void* const* buffers, const uint64_t grid[3]) {
  if (begins(kernel, "append_")) {
    const auto& arguments = arguments_at<AppendArguments>(buffers, 5);
    return own_rows(kernel, buffers, 2, arguments.place, arguments.rows);
  }
  if (begins(kernel, "project_append_")) {
    const auto& arguments = arguments_at<ProjectArguments>(buffers, 9);
    return own_rows(kernel, buffers, 5, arguments.place, arguments.rows);
  }
  if (begins(kernel, "decode_split_")) {
    return decode_reads(kernel, buffers, grid[1]);
  }
  if (begins(kernel, "gather_")) {
    const auto& arguments = arguments_at<GatherArguments>(buffers, 5);
    Rows rows(kernel, buffers, 0, arguments.place);
    rows.touch(arguments.row, arguments.first, arguments.tokens, false);
    return rows.touched;
  }
  for (const DeltaKernel& its : kDeltaKernels) {
    if (begins(kernel, its.family)) {
      Slots slots(
          kernel, buffers, its.slots, arguments_at<DeltaArguments>(buffers, its.arguments));
      slots.touch(its);
      return slots.touched;
    }
  }
  return {};
}

}  // namespace quire::graph
