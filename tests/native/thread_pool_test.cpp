#include "core/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"

namespace quire {
namespace {

// Plain numbers are used where the pool promises order: under ThreadSanitizer a broken promise is a
// report, elsewhere a wrong sum.

void spin(std::chrono::nanoseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

TEST("every index runs once, and the caller sees what its tasks wrote") {
  for (int64_t threads : {1, 2, 3, 4, 8}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == static_cast<size_t>(threads));
    std::vector<int> times(300);
    for (int round = 0; round < 1500; ++round) {
      const size_t count = static_cast<size_t>(round * 7 % 300);
      pool.run(count, [&](size_t index, size_t) { ++times[index]; });
      for (size_t i = 0; i < count; ++i) {
        CHECK_CASE(times[i] == 1, std::to_string(threads) + " threads");
        times[i] = 0;
      }
    }
  }
}

TEST("tasks that run at the same time have different workers below threads()") {
  constexpr size_t kThreads = 4;
  ThreadPool pool(kThreads);
  std::vector<uint64_t> work(kThreads);  // as scratch is used: one place for each worker
  std::atomic<bool> beyond{false};
  size_t expected = 0;
  for (int round = 0; round < 500; ++round) {
    expected += 40;
    pool.run(40, [&](size_t, size_t worker) {
      if (worker >= kThreads) {
        beyond = true;
        return;
      }
      const uint64_t before = work[worker];
      spin(std::chrono::nanoseconds(300));
      work[worker] = before + 1;  // lost where two tasks share a place
    });
    size_t sum = 0;
    for (uint64_t w : work) {
      sum += w;
    }
    CHECK(!beyond);
    CHECK(sum == expected);
  }
}

TEST("more than one thread takes part") {
  ThreadPool pool(2);
  bool helped = false;
  // A helper that is called comes when the system has a processor for it.
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!helped && std::chrono::steady_clock::now() < patience) {
    std::vector<size_t> workers(8);
    pool.run(8, [&](size_t index, size_t worker) {
      workers[index] = worker;
      spin(std::chrono::microseconds(200));
    });
    for (size_t worker : workers) {
      helped = helped || worker == 1;
    }
  }
  CHECK(helped);
}

TEST("tasks of very different lengths are all done when a round ends") {
  ThreadPool pool(3);
  for (size_t round = 0; round < 30; ++round) {
    std::vector<uint64_t> results(24);
    pool.run(results.size(), [&](size_t index, size_t) {
      // The long one comes last, first or in between.
      spin(std::chrono::microseconds(index == round % results.size() ? 3000 : 2));
      results[index] = index + 1;
    });
    for (size_t i = 0; i < results.size(); ++i) {
      CHECK(results[i] == i + 1);
    }
  }
}

// A helper that wakes late finds the round over: it must neither touch the old task, which is gone,
// nor take an index of the next round with the old count.
TEST("a helper that comes late touches nothing of a finished round") {
  ThreadPool pool(4);
  uint64_t sum = 0;
  uint64_t expected = 0;
  for (uint64_t round = 0; round < 20000; ++round) {
    const size_t count = 2 + round % 3;
    const auto places = std::make_unique<std::vector<uint64_t>>(count, 0);
    auto task = std::make_unique<ThreadPool::Task>([&places, round](size_t index, size_t) {
      places->at(index) += round;
      spin(std::chrono::nanoseconds(round % 7 * 300));
    });
    pool.run(count, *task);
    task.reset();
    for (uint64_t place : *places) {
      sum += place;
    }
    expected += round * count;
  }
  CHECK(sum == expected);
}

TEST("rounds follow rests of every length") {
  ThreadPool pool(2);
  for (int round = 0; round < 300; ++round) {
    spin(std::chrono::microseconds(round % 60));  // around the time that helpers keep watching
    std::vector<int> seen(4);
    pool.run(4, [&](size_t index, size_t) { seen[index] = round; });
    for (int value : seen) {
      CHECK(value == round);
    }
  }
}

TEST("pools come and go, used or not, with their helpers asleep or at work") {
  for (int round = 0; round < 300; ++round) {
    ThreadPool pool(1 + round % 5);
    std::vector<int> seen(16);
    for (int run = 0; run < round % 4; ++run) {
      pool.run(seen.size(), [&](size_t index, size_t) { seen[index] += 1; });
    }
    for (int value : seen) {
      CHECK(value == round % 4);
    }
  }
}

TEST("a task may use another pool, and pools may live inside one another") {
  ThreadPool outer(3);
  for (int round = 0; round < 40; ++round) {
    std::vector<std::vector<int>> grid(4, std::vector<int>(9));
    outer.run(grid.size(), [&](size_t row, size_t) {
      ThreadPool inner(2);
      inner.run(grid[row].size(), [&](size_t column, size_t) { grid[row][column] += 1; });
    });
    for (const auto& row : grid) {
      for (int cell : row) {
        CHECK(cell == 1);
      }
    }
  }
}

TEST("operations of several threads hold the pool one at a time") {
  ThreadPool pool(2);
  uint64_t shared = 0;
  std::vector<std::thread> users;
  for (int user = 0; user < 3; ++user) {
    users.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        const auto held = pool.hold();
        float* const place = pool.scratch(64 + static_cast<size_t>(round));
        pool.run(64, [&](size_t index, size_t) { place[index] = static_cast<float>(index); });
        for (size_t i = 0; i < 64; ++i) {
          shared += static_cast<uint64_t>(place[i]);
        }
      }
    });
  }
  for (std::thread& user : users) {
    user.join();
  }
  CHECK(shared == 3 * 200 * (63 * 64 / 2));
}

TEST("scratch is on a cache line, as large as asked, and grows") {
  ThreadPool pool(1);
  for (size_t floats : {1u, 15u, 16u, 17u, 1000u, 999u, 100'000u, 3u}) {
    float* const place = pool.scratch(floats);
    CHECK(reinterpret_cast<uintptr_t>(place) % 64 == 0);
    for (size_t i = 0; i < floats; ++i) {
      place[i] = 1.0f;  // AddressSanitizer watches the end
    }
  }
}

TEST("what is not worth a helper is run by the caller alone, inside of a task as well") {
  ThreadPool pool(3);
  std::atomic<int> elsewhere{0};
  std::atomic<int> ran{0};
  pool.run(20, [&](size_t, size_t) {
    const auto here = std::this_thread::get_id();
    pool.run(10, [&](size_t, size_t worker) {
      elsewhere += std::this_thread::get_id() != here || worker != 0 ? 1 : 0;
      ++ran;
    }, false);
  });
  CHECK(ran == 200);
  CHECK(elsewhere == 0);
}

TEST("a pool has between 1 and 256 threads") {
  for (int64_t bad : {INT64_MIN, int64_t{-1}, int64_t{0}, int64_t{257}, INT64_MAX}) {
    CHECK(test::throws<std::out_of_range>(
        "threads is " + std::to_string(bad) + ";", [&] { ThreadPool pool(bad); }));
  }
}

}  // namespace
}  // namespace quire
