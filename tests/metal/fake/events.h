#pragma once

#include <algorithm>
#include <cstdint>

#include "object.h"

namespace quire::fake {

class Event final : public Object {
 public:
  Event() : Object("MTLSharedEvent") {}

  uint64_t signaled_value();
  void set_signaled_value(uint64_t value);
  bool wait(uint64_t value, uint64_t milliseconds);

  // By the device, under the machine's mutex. Reports a value that is not above the last one.
  void signal(uint64_t value);
  uint64_t value() const { return value_; }
  // The highest value that the host was told of.
  uint64_t seen() const { return seen_; }

  int queued = 0;  // signals that have not been done

 protected:
  void dealloc() override;

 private:
  uint64_t value_ = 0;
  uint64_t seen_ = 0;
};

}  // namespace quire::fake
