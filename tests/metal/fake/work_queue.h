#pragma once

#include <deque>
#include <functional>
#include <string>

#include "machine.h"
#include "object.h"

namespace quire::fake {

// One thing that a queue of the device does.
struct Work {
  std::string what;
  std::function<bool()> ready;  // whether it may begin
  std::function<void()> run;
  unsigned turns = 0;  // that it lets pass first
};

// Work in order. Several queues go on side by side, in any order.
class WorkQueue : public Object {
 public:
  explicit WorkQueue(const char* class_name) : Object(class_name) {
    const std::lock_guard lock(Machine::current().mutex);
    Machine::current().add_queue(this);
  }

  // Under the machine's mutex.
  void enqueue(std::string what, std::function<bool()> ready, std::function<void()> run) {
    Machine& machine = Machine::current();
    const auto turns = machine.random(machine.options().slowness + 1);
    work_.push_back({std::move(what), std::move(ready), std::move(run),
                     static_cast<unsigned>(turns)});
    machine.changed();
  }
  bool idle() const { return work_.empty(); }
  bool ready() const { return !idle() && (!work_.front().ready || work_.front().ready()); }
  std::string next() const { return work_.front().what; }
  void step() {
    if (work_.front().turns > 0) {
      --work_.front().turns;
      return;
    }
    const Work work = std::move(work_.front());
    work_.pop_front();
    work.run();
  }

 protected:
  void dealloc() override {
    Machine& machine = Machine::current();
    const std::lock_guard lock(machine.mutex);
    if (!idle()) {
      report("a " + name() + " was released before it came to: " + next());
    }
    machine.remove_queue(this);
  }

 private:
  std::deque<Work> work_;
};

}  // namespace quire::fake
