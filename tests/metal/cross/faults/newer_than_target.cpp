// libc++ can read floating-point numbers since macOS 26.
#include <charconv>

extern "C" __attribute__((used)) double planted_fault(const char* first, const char* last) {
  double value = 0;
  std::from_chars(first, last, value);
  return value;
}
