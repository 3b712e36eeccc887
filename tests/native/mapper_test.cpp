#include "core/mapper.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <future>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"

namespace quire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLong{30};

TEST("tickets rise by one and complete in order") {
  Mapper mapper;
  CHECK(mapper.completed() == 0);
  CHECK(mapper.wait(0, milliseconds(0)));
  std::vector<uint64_t> order;  // written by the mapper's thread alone; read once it is done
  for (uint64_t i = 1; i <= 1000; ++i) {
    CHECK(mapper.submit([&order, &mapper, i] {
      order.push_back(i);
      order.push_back(mapper.completed());  // never this ticket: it is not done yet
    }) == i);
  }
  CHECK(mapper.wait(1000, kLong));
  CHECK(mapper.completed() == 1000);
  CHECK(order.size() == 2000);
  for (uint64_t i = 1; i <= 1000; ++i) {
    CHECK(order[2 * i - 2] == i && order[2 * i - 1] == i - 1);
  }
  CHECK(mapper.failure().empty());
}

TEST("a wait ends when its time has passed, and when its ticket is done") {
  Mapper mapper;
  std::promise<void> gate;
  const uint64_t first = mapper.submit([wait = gate.get_future().share()] { wait.wait(); });
  const uint64_t second = mapper.submit([] {});
  const auto start = std::chrono::steady_clock::now();
  CHECK(!mapper.wait(first, milliseconds(30)));
  CHECK(!mapper.wait(second, milliseconds(0)));
  CHECK(std::chrono::steady_clock::now() - start >= milliseconds(30));
  CHECK(mapper.completed() == 0);
  gate.set_value();
  CHECK(mapper.wait(second, kLong));
  CHECK(mapper.completed() == 2);
}

TEST("threads that submit at once get tickets of their own, and each keeps its order") {
  constexpr int kThreads = 4;
  constexpr int kEach = 500;
  Mapper mapper;
  std::vector<std::pair<int, int>> ran;
  std::vector<std::vector<uint64_t>> tickets(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        tickets[t].push_back(mapper.submit([&ran, t, i] { ran.emplace_back(t, i); }));
        if (i % 50 == 0) {
          mapper.wait(tickets[t].back(), kLong);
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(mapper.wait(kThreads * kEach, kLong));
  std::vector<int> next(kThreads, 0);
  for (const auto& [t, i] : ran) {
    CHECK(i == next[t]++);
  }
  std::vector<uint64_t> all;
  for (const auto& mine : tickets) {
    CHECK(mine.size() == kEach && std::is_sorted(mine.begin(), mine.end()));
    all.insert(all.end(), mine.begin(), mine.end());
  }
  std::sort(all.begin(), all.end());
  for (uint64_t i = 0; i < all.size(); ++i) {
    CHECK(all[i] == i + 1);
  }
}

TEST("the first failure is kept, and what follows runs all the same") {
  Mapper mapper;
  bool ran = false;
  mapper.submit([] {});
  const uint64_t bad = mapper.submit([] { throw std::runtime_error("the first"); });
  CHECK(mapper.wait(bad, kLong));
  CHECK(mapper.failure() == "the first");
  mapper.submit([] { throw std::logic_error("the second"); });
  const uint64_t last = mapper.submit([&] { ran = true; });
  CHECK(mapper.wait(last, kLong));
  CHECK(ran);
  CHECK(mapper.failure() == "the first");
}

TEST("what the system refuses an attempt is no failure, and is told once") {
  Mapper mapper;
  const auto out_of_memory = [] {
    throw std::system_error(ENOMEM, std::generic_category(), "mmap");
  };
  mapper.attempt([] {});
  const uint64_t bad = mapper.attempt(out_of_memory);
  const uint64_t last = mapper.attempt([] {});
  CHECK(mapper.wait(last, kLong));
  CHECK(mapper.failure().empty());
  CHECK(!mapper.refused(bad - 1) && !mapper.refused(last));
  CHECK(mapper.refused(bad));
  CHECK(!mapper.refused(bad));
}

TEST("an attempt can fail, and what was not attempted cannot be refused") {
  for (const bool attempted : {false, true}) {
    Mapper mapper;
    const uint64_t bad =
        attempted ? mapper.attempt([] { throw std::logic_error("a bug"); })
                  : mapper.submit([] {
                      throw std::system_error(ENOMEM, std::generic_category(), "mmap");
                    });
    CHECK(mapper.wait(bad, kLong));
    CHECK(!mapper.refused(bad));
    CHECK(mapper.failure().find(attempted ? "a bug" : "mmap") == 0);
  }
}

TEST("whether an attempt was refused is not known before it is done") {
  Mapper mapper;
  std::promise<void> gate;
  const uint64_t ticket = mapper.attempt([wait = gate.get_future().share()] { wait.wait(); });
  CHECK(test::throws<std::logic_error>("ticket 1 is not completed", [&] { mapper.refused(1); }));
  CHECK(test::throws<std::logic_error>("ticket 2 is not completed", [&] { mapper.refused(2); }));
  gate.set_value();
  CHECK(mapper.wait(ticket, kLong));
  CHECK(!mapper.refused(ticket));
}

TEST("a mapper that goes finishes what was submitted") {
  for (int round = 0; round < 50; ++round) {
    int ran = 0;
    {
      Mapper mapper;
      for (int i = 0; i < round; ++i) {
        mapper.submit([&ran] { ++ran; });
      }
    }
    CHECK(ran == round);
  }
}

TEST("an operation has let go of what it held when its ticket is seen as done") {
  Mapper mapper;
  for (int i = 0; i < 200; ++i) {
    auto held = std::make_shared<int>(i);
    const std::weak_ptr<int> watched = held;
    const uint64_t ticket = mapper.submit([held = std::move(held)] { (void)*held; });
    CHECK(mapper.wait(ticket, kLong));
    CHECK(watched.expired());
  }
}

}  // namespace
}  // namespace quire
