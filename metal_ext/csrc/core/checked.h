#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

// Checks of integers, which throw errors that name the wrong argument.
namespace quire {

// Returns an integer argument, or throws an error with its name and its allowed interval.
inline uint64_t checked_between(
    const char* name, int64_t value, int64_t lowest, int64_t highest) {
  if (value < lowest || value > highest) {
    throw std::out_of_range(
        std::string(name) + " is " + std::to_string(value) + "; it must lie between " +
        std::to_string(lowest) + " and " + std::to_string(highest));
  }
  return static_cast<uint64_t>(value);
}

// Throws std::out_of_range if [first, first + count) is empty or not inside [0, end).
inline void checked_run(const char* name, int64_t first, int64_t count, uint64_t end) {
  if (first < 0 || count < 1 || static_cast<uint64_t>(first) > end ||
      static_cast<uint64_t>(count) > end - static_cast<uint64_t>(first)) {
    throw std::out_of_range(
        std::string(name) + " [" + std::to_string(first) + ", " + std::to_string(first) + " + " +
        std::to_string(count) + ") does not lie inside [0, " + std::to_string(end) + ")");
  }
}

// Converts a number to a narrower type, or throws std::out_of_range if the number does not fit.
template <class Narrow, class Number>
Narrow narrowed(const char* name, Number number) {
  if (!std::in_range<Narrow>(number)) {
    throw std::out_of_range(
        std::string(name) + " is " + std::to_string(number) + "; it must be " +
        std::to_string(std::numeric_limits<Narrow>::max()) + " at most");
  }
  return static_cast<Narrow>(number);
}

}  // namespace quire
