#include <stdexcept>
#include <thread>

#include "check.h"
#include "core/metal/epochs.h"
#include "fake/fake_metal.h"

namespace quire::metal {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::throws;

struct Clock {
  fake::Machine machine;
  NS::SharedPtr<MTL::Device> device = fake::new_device();
  Epochs epochs{device.get()};
};

TEST("epochs rise by one, and are complete when the device has signalled them") {
  Clock clock;
  Epochs& epochs = clock.epochs;
  CHECK(epochs.newest() == 0 && epochs.completed() == 0);
  CHECK(epochs.start() == 1 && epochs.start() == 2 && epochs.newest() == 2);
  CHECK(epochs.wait(0, milliseconds(0)));
  CHECK(!epochs.wait(1, milliseconds(5)));
  epochs.event()->setSignaledValue(1);
  CHECK(epochs.completed() == 1);
  CHECK(epochs.wait(1, milliseconds(0)));
  epochs.event()->setSignaledValue(2);
  CHECK(epochs.completed() == 2);
}

TEST("a later signal covers the epochs before it") {
  Clock clock;
  for (int i = 0; i < 3; ++i) {
    clock.epochs.start();
  }
  clock.epochs.event()->setSignaledValue(3);
  CHECK(clock.epochs.completed() == 3);
}

TEST("an abandoned epoch counts only when all before it are complete") {
  Clock clock;
  Epochs& epochs = clock.epochs;
  for (int i = 0; i < 4; ++i) {
    epochs.start();
  }
  epochs.abandon(2);
  epochs.abandon(3);
  CHECK(epochs.completed() == 0);
  epochs.event()->setSignaledValue(1);
  CHECK(epochs.completed() == 3);
  epochs.abandon(1);  // long complete
  epochs.event()->setSignaledValue(4);
  CHECK(epochs.completed() == 4);
}

TEST("what was never started cannot be abandoned, and what was signalled was started") {
  Clock clock;
  Epochs& epochs = clock.epochs;
  epochs.start();
  CHECK(throws<std::logic_error>("epoch 2 was never started", [&] { epochs.abandon(2); }));
  CHECK(throws<std::logic_error>("epoch 0 was never started", [&] { epochs.abandon(0); }));
  epochs.event()->setSignaledValue(2);
  CHECK(throws<std::logic_error>("epoch 2 was signalled, but the newest is 1", [&] {
    epochs.completed();
  }));
}

TEST("a wait looks at the device once, even when its time has passed before it came to that") {
  Clock clock;
  Epochs& epochs = clock.epochs;
  epochs.start();
  clock.machine.while_waiting([&] { epochs.event()->setSignaledValue(1); });
  CHECK(epochs.wait(1, milliseconds(0)));
  epochs.start();
  clock.machine.while_waiting([&] { epochs.abandon(2); });
  CHECK(epochs.wait(2, milliseconds(0)));
}

TEST("threads that wait for an epoch go on when it is abandoned") {
  Clock clock;
  Epochs& epochs = clock.epochs;
  epochs.start();
  bool waited = false;
  std::thread waiting([&] { waited = epochs.wait(1, seconds(30)); });
  std::this_thread::sleep_for(milliseconds(5));
  epochs.abandon(1);
  waiting.join();
  CHECK(waited);
}

TEST("a pause waits for a second for the signal of a step that was read before it came") {
  Clock clock;
  Epochs& epochs = clock.epochs;
  epochs.start();
  const auto began = std::chrono::steady_clock::now();
  CHECK(throws<std::logic_error>("blocks are mapped while epoch 1 is in flight", [&] {
    epochs.pause("blocks are mapped");
  }));
  CHECK(std::chrono::steady_clock::now() - began >= seconds(1));
  clock.machine.while_waiting([&] { epochs.event()->setSignaledValue(1); });
  {
    const Epochs::Pause pause = epochs.pause("blocks are mapped");
    CHECK(throws<std::logic_error>("before mappings are finished", [&] { epochs.start(); }));
  }
  epochs.pause("blocks are mapped");
  CHECK(epochs.late_signals() == 2);
  CHECK(epochs.start() == 2);
}

TEST("what runs while nothing is in flight keeps other threads from starting steps") {
  Clock clock;
  Epochs& epochs = clock.epochs;
  bool ran = false;
  CHECK(epochs.while_idle(milliseconds(0), [&] { ran = true; }));
  CHECK(ran);
  epochs.start();
  CHECK(!epochs.while_idle(milliseconds(5), [&] { ran = false; }));
  CHECK(ran);
  epochs.event()->setSignaledValue(1);
  bool started = false;
  std::thread engine;
  CHECK(epochs.while_idle(seconds(1), [&] {
    engine = std::thread([&] {
      epochs.start();
      started = true;
    });
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(!started);
  }));
  engine.join();
  CHECK(started && epochs.newest() == 2);
}

}  // namespace
}  // namespace quire::metal
