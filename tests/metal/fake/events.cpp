#include "events.h"

#include "machine.h"

namespace quire::fake {
namespace {

const auto defined = [] {
  define("MTLSharedEvent")
      .method<&Event::signaled_value>("signaledValue")
      .method<&Event::set_signaled_value>("setSignaledValue:")
      .method<&Event::wait>("waitUntilSignaledValue:timeoutMS:");
  return true;
}();

}  // namespace

uint64_t Event::signaled_value() {
  const std::lock_guard lock(Machine::current().mutex);
  seen_ = value_;
  return value_;
}

void Event::set_signaled_value(uint64_t value) {
  const std::lock_guard lock(Machine::current().mutex);
  signal(value);
}

void Event::signal(uint64_t value) {
  if (value <= value_) {
    report(
        "an event at " + std::to_string(value_) + " was signalled with " + std::to_string(value));
    return;
  }
  value_ = value;
  Machine::current().changed();
}

bool Event::wait(uint64_t value, uint64_t milliseconds) {
  Machine& machine = Machine::current();
  {
    const std::lock_guard lock(machine.mutex);
    ++machine.waits;
  }
  const bool reached = machine.wait_until(
      [this, value] { return value_ >= value; }, std::chrono::milliseconds(milliseconds));
  if (reached) {
    const std::lock_guard lock(machine.mutex);
    seen_ = value_;
  }
  return reached;
}

void Event::dealloc() {
  const std::lock_guard lock(Machine::current().mutex);
  if (queued > 0) {
    report("an event was released while a signal of it is queued");
  }
}

}  // namespace quire::fake
