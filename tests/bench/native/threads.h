#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;

// Runs `work(thread)` on all threads at once; returns the seconds from the first one's begin to the
// last one's end.
inline double seconds_of_all(size_t threads, const std::function<void(size_t)>& work) {
  std::barrier<> all_here(static_cast<std::ptrdiff_t>(threads));
  std::vector<Clock::time_point> begins(threads), ends(threads);
  const auto one = [&](size_t thread) {
    all_here.arrive_and_wait();
    begins[thread] = Clock::now();
    work(thread);
    ends[thread] = Clock::now();
  };
  std::vector<std::thread> others;
  for (size_t thread = 1; thread < threads; ++thread) {
    others.emplace_back(one, thread);
  }
  one(0);
  for (auto& other : others) {
    other.join();
  }
  const auto begin = *std::min_element(begins.begin(), begins.end());
  const auto end = *std::max_element(ends.begin(), ends.end());
  return std::chrono::duration<double>(end - begin).count();
}
