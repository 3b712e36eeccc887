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
    const uint32_t first = task[i].split * split_tokens(position);
    const uint32_t end = std::min(first + split_tokens(position), position + 1);
    rows.touch(row, first, end - first, false);
  }
  return rows.touched;
}

}  // namespace

const Bindings& bindings_of(const std::string& kernel) {
  static const std::vector<std::pair<const char*, Bindings>> families{
      {"append_", {6, {}}},              {"project_append_", {10, {8}}},
      {"decode_split_", {9, {5, 6, 7}}}, {"decode_combine_", {5, {3}}},
      {"gather_", {6, {3, 4}}},          {"swiglu_", {4, {2}}},
      {"mark_step", {2, {0}}}};
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
    rows.touch(arguments.row, 0, arguments.tokens, false);
    return rows.touched;
  }
  return {};
}

}  // namespace quire::graph
