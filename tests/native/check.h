#pragma once

#include <stdexcept>
#include <string>
#include <vector>

// The little that these tests need of a test framework. A test is a sentence and a body:
//
//   TEST("a block that is mapped twice is refused") { CHECK(...); }
namespace quire::test {

struct Test {
  const char* sentence;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registered {
  Registered(const char* sentence, void (*body)()) { tests().push_back({sentence, body}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

// Whether body throws an Error whose text contains `part`.
template <class Error, class Body>
bool throws(const std::string& part, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return std::string(error.what()).find(part) != std::string::npos;
  }
  return false;
}

}  // namespace quire::test

#define QUIRE_JOIN_(a, b) a##b
#define QUIRE_JOIN(a, b) QUIRE_JOIN_(a, b)
#define TEST(sentence)                                                                      \
  static void QUIRE_JOIN(test_, __LINE__)();                                                \
  static const ::quire::test::Registered QUIRE_JOIN(registered_, __LINE__)(                 \
      sentence, QUIRE_JOIN(test_, __LINE__));                                               \
  static void QUIRE_JOIN(test_, __LINE__)()
#define CHECK(condition)                                     \
  do {                                                       \
    if (!(condition)) {                                      \
      ::quire::test::fail(__FILE__, __LINE__, #condition);   \
    }                                                        \
  } while (false)
// The same with the case at hand, where a loop tries many.
#define CHECK_CASE(condition, name)                                                      \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      ::quire::test::fail(__FILE__, __LINE__, std::string(#condition) + " for " + (name)); \
    }                                                                                    \
  } while (false)
