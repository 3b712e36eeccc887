#include <algorithm>
#include <cstdlib>

#include "check.h"
#include "life.h"

namespace quire::metal {
namespace {

// SEEDS in the environment: how many percent of the lives are lived.
unsigned lives(unsigned most) {
  const char* const percent = std::getenv("SEEDS");
  return percent == nullptr
             ? most
             : (most * static_cast<unsigned>(std::atoi(percent)) + 99) / 100;
}

void live_all(unsigned count, Life::Options options) {
  Life::Deeds deeds;
  for (unsigned seed = 1; seed <= lives(count); ++seed) {
    options.seed = seed;
    try {
      deeds.add(Life(options).live());
    } catch (const std::exception& error) {
      throw std::runtime_error("life " + std::to_string(seed) + ": " + error.what());
    }
  }
  std::printf("        %s\n", deeds.text().c_str());
  // Of fewer lives nobody can ask everything.
  if (lives(count) == count) {
    const std::vector<std::string> missing = deeds.missing(options);
    CHECK_CASE(missing.empty(), missing.front());
  }
}

TEST("engines live over sparse buffers in any order of what the device does") {
  live_all(2000, {.kind = Kind::sparse, .seed = 0});
}

TEST("engines live that change mappings beside steps, where a device lets them") {
  live_all(2000, {.kind = Kind::sparse, .seed = 0, .bold = true});
}

TEST("engines live over a page table in any order of what the device does") {
  live_all(1000, {.kind = Kind::paged, .seed = 0});
}

TEST("engines live over an arena in any order of what the device does") {
  live_all(1000, {.kind = Kind::dense, .seed = 0});
}

TEST("engines live over several buffers per sequence, and rows of different lengths") {
  live_all(400, {.kind = Kind::sparse,
                 .seed = 0,
                 .row_bytes = {1024, 1024, 2048, 3072, 1024, 1024, 1024, 1024},
                 .max_buffer_bytes = size_t{640} << 10});
  live_all(200, {.kind = Kind::sparse,
                 .seed = 0,
                 .bold = true,
                 .row_bytes = {1024, 1024, 2048, 3072, 1024, 1024, 1024, 1024},
                 .max_buffer_bytes = size_t{640} << 10});
}

TEST("engines live over few and small residency sets") {
  live_all(400, {.kind = Kind::sparse, .seed = 0, .few_sets = true});
  live_all(400, {.kind = Kind::sparse, .seed = 0, .bold = true, .few_sets = true});
  live_all(200, {.kind = Kind::paged, .seed = 0, .few_sets = true});
}

TEST("engines live until the device falls silent") {
  for (const Kind kind : {Kind::sparse, Kind::paged, Kind::dense}) {
    for (unsigned seed = 1; seed <= lives(200); ++seed) {
      const bool bold = seed % 2 == 0;
      try {
        Life({.kind = kind, .seed = seed, .bold = bold, .timeout = std::chrono::milliseconds(10)})
            .live_until_silence();
      } catch (const std::exception& error) {
        throw std::runtime_error("life " + std::to_string(seed) + ": " + error.what());
      }
    }
  }
}

TEST("engines live where there are no residency sets") {
  live_all(200, {.kind = Kind::paged,
                 .seed = 0,
                 .lacks = {"MTLDevice newResidencySetWithDescriptor:error:"}});
}

TEST("engines live with threads of the mapper's and the device's own, over sparse buffers") {
  for (const bool bold : {false, true}) {
    live_all(150, {.kind = Kind::sparse, .seed = 0, .threads = true, .bold = bold});
    live_all(
        50, {.kind = Kind::sparse, .seed = 0, .threads = true, .bold = bold, .few_sets = true});
  }
}

TEST("engines live with threads, over a page table") {
  live_all(100, {.kind = Kind::paged, .seed = 0, .threads = true});
}

TEST("engines live with threads, over an arena") {
  live_all(100, {.kind = Kind::dense, .seed = 0, .threads = true});
}

}  // namespace
}  // namespace quire::metal
