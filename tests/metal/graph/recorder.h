#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "timeline.h"

namespace quire::graph {

// A mistake planted in the calls that an operation makes to MLX's encoder.
struct Plant {
  std::string operation;  // "" for none, "*" for all
  std::string call;
  std::set<size_t> which;  // of the calls of that name in each evaluation, from 0
  // "drop": the call is not made. "input": an output is only bound, and is not said to be written.
  // "register": an output is said to be written, but not to follow what wrote it before. "no wait":
  // an encoder ends without waiting for those in flight.
  std::string how;
};

struct Counts {
  uint64_t operations = 0;
  uint64_t commands = 0;
  uint64_t encoders = 0;
  uint64_t command_buffers = 0;
  uint64_t barriers = 0;
  uint64_t waits = 0;  // for fences
};

// What the model of MLX's encoder has seen. One per process; engine's thread, but for report().
class Recorder {
 public:
  static Recorder& instance();

  // An operation begins to encode. Sometimes MLX has ended the encoder behind the one before, or
  // given the command buffer away too: by chance here. Every third seed does so each time.
  void begin(const std::string& operation);
  void seed(uint64_t seed);

  // Whether MLX's own operation encodes.
  bool foreign() const { return operation_ == kForeign; }
  static constexpr const char* kForeign = "MLX's own";

  // Notes a call; returns how it is to be made: "" as it is, or the plant's word.
  std::string call(const std::string& name);
  bool quiet() const { return quiet_ > 0; }
  void plant(Plant plant) { plant_ = std::move(plant); }
  const Plant& planted() const { return plant_; }
  // The calls that the last evaluation of an operation made.
  std::vector<std::string> calls(const std::string& operation) const;

  // An array's memory is written or read by a command; views of a device's memory are read there.
  void array_written(const std::shared_ptr<mlx::core::array::Data>& data, Command command);
  void array_read(const std::shared_ptr<mlx::core::array::Data>& data, Command command);

  // A signal was encoded, behind these encoders: once the host has seen the value, they have run.
  void signalled(const void* event, uint64_t value, std::set<Encoder> encoders);
  // MLX gives its command buffer away.
  void hand_over();
  // The same, all of it has run, and the host knows it.
  void settle();

  void report(const std::string& mistake);
  std::vector<std::string> take_mistakes();

  Timeline timeline;
  Counts counts;

 private:
  struct Signal {
    const void* event;
    uint64_t value;
    std::set<Encoder> encoders;
  };
  struct Written {
    std::weak_ptr<mlx::core::array::Data> data;
    Command command;
  };

  friend class Quietly;

  void see_signals();

  int quiet_ = 0;
  std::minstd_rand random_{1};
  unsigned ends_in_eight_ = 2;  // of encoders, between two operations
  std::string operation_;
  Plant plant_;
  std::map<std::string, std::vector<std::string>> calls_;
  std::map<const mlx::core::array::Data*, Written> written_;
  std::vector<Signal> signals_;
  std::mutex mutex_;
  std::vector<std::string> mistakes_;
};

// Calls that are no operation's: MLX's own, and those that a call makes inside.
class Quietly {
 public:
  Quietly() { ++Recorder::instance().quiet_; }
  ~Quietly() { --Recorder::instance().quiet_; }
  Quietly(const Quietly&) = delete;
  Quietly& operator=(const Quietly&) = delete;
};

}  // namespace quire::graph
