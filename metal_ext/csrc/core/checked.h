#pragma once

#include <cstdint>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

// Checks, which throw errors that say what is wrong.
namespace quire {

// Joins words and numbers. (GCC 12 has no std::format.)
template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return std::move(text).str();
}

// Throws an Error with the joined parts unless `holds`.
template <class Error, class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) {
    throw Error(message(parts...));
  }
}

// Returns an integer argument, or throws an error with its name and its allowed interval.
inline uint64_t checked_between(
    const char* name, int64_t value, int64_t lowest, int64_t highest) {
  require<std::out_of_range>(lowest <= value && value <= highest, name, " is ", value,
                             "; it must lie between ", lowest, " and ", highest);
  return static_cast<uint64_t>(value);
}

// Throws std::out_of_range if [first, first + count) is empty or not inside [0, end).
inline void checked_run(const char* name, int64_t first, int64_t count, uint64_t end) {
  require<std::out_of_range>(
      first >= 0 && count >= 1 && static_cast<uint64_t>(first) <= end &&
          static_cast<uint64_t>(count) <= end - static_cast<uint64_t>(first),
      name, " [", first, ", ", first, " + ", count, ") does not lie inside [0, ", end, ")");
}

// Converts a number to a narrower type, or throws std::out_of_range if the number does not fit.
template <class Narrow, class Number>
Narrow narrowed(const char* name, Number number) {
  require<std::out_of_range>(std::in_range<Narrow>(number), name, " is ", number,
                             "; it must be ", std::numeric_limits<Narrow>::max(), " at most");
  return static_cast<Narrow>(number);
}

}  // namespace quire
