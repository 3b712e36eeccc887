#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>

#include "check.h"

// Runs every test of the program, or those whose sentence contains the argument; with a second
// argument, until one fails.
int main(int argc, char** argv) {
  const char* const part = argc > 1 ? argv[1] : "";
  int ran = 0;
  int failed = 0;
  for (const auto& test : quire::test::tests()) {
    if (std::strstr(test.sentence, part) == nullptr) {
      continue;
    }
    ++ran;
    const auto start = std::chrono::steady_clock::now();
    std::string problem;
    try {
      test.body();
    } catch (const std::exception& error) {
      problem = error.what();
      ++failed;
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%s  %5.2f s  %s\n", problem.empty() ? "ok    " : "FAILED", took.count(),
                test.sentence);
    if (!problem.empty()) {
      std::printf("        %s\n", problem.c_str());
    }
    std::fflush(stdout);
    if (failed > 0 && argc > 2) {
      break;
    }
  }
  std::printf("%d tests, %d failed\n", ran, failed);
  return failed == 0 && ran > 0 ? 0 : 1;
}
