#include "recorder.h"

#include <algorithm>
#include <array>

#include "fake/events.h"
#include "mlx_model.h"

namespace quire::graph {

Recorder& Recorder::instance() {
  static auto* const recorder = new Recorder;  // for the life of the process
  return *recorder;
}

void Recorder::seed(uint64_t seed) {
  random_.seed(static_cast<std::minstd_rand::result_type>(seed));
  ends_in_eight_ = std::array{8u, 2u, 5u}[seed % 3];
}

void Recorder::begin(const std::string& operation) {
  ++counts.operations;
  operation_ = operation;
  calls_[operation].clear();
  see_signals();
  std::erase_if(written_, [](const auto& entry) { return entry.second.data.expired(); });
  const auto chance = random_() % 8;
  if (chance < ends_in_eight_) {
    end_encoder();
  }
  if (chance == 0) {
    next_command_buffer();
  }
}

std::string Recorder::call(const std::string& name) {
  if (quiet()) {
    return "";
  }
  auto& made = calls_[operation_];
  const auto which = static_cast<size_t>(std::count(made.begin(), made.end(), name));
  made.push_back(name);
  const bool ours = plant_.operation == operation_ || plant_.operation == "*";
  return ours && plant_.call == name && plant_.which.contains(which) ? plant_.how : "";
}

std::vector<std::string> Recorder::calls(const std::string& operation) const {
  const auto found = calls_.find(operation);
  return found == calls_.end() ? std::vector<std::string>{} : found->second;
}

void Recorder::array_written(
    const std::shared_ptr<mlx::core::array::Data>& data, Command command) {
  written_[data.get()] = {data, command};
}

void Recorder::array_read(
    const std::shared_ptr<mlx::core::array::Data>& data, Command command) {
  const auto found = written_.find(data.get());
  if (found != written_.end() && !found->second.data.expired()) {
    timeline.uses(command, found->second.command);
  }
}

void Recorder::signalled(const void* event, uint64_t value, std::set<Encoder> encoders) {
  signals_.push_back({event, value, std::move(encoders)});
}

void Recorder::see_signals() {
  std::erase_if(signals_, [this](const Signal& signal) {
    const bool seen = static_cast<const fake::Event*>(signal.event)->seen() >= signal.value;
    if (seen) {
      timeline.complete(signal.encoders);
    }
    return seen;
  });
}

void Recorder::hand_over() {
  end_encoder();
  next_command_buffer();
}

void Recorder::settle() {
  hand_over();
  timeline.complete(timeline.closed());
}

void Recorder::report(const std::string& mistake) {
  const std::lock_guard lock(mutex_);
  if (std::find(mistakes_.begin(), mistakes_.end(), mistake) == mistakes_.end()) {
    mistakes_.push_back(mistake);
  }
}

std::vector<std::string> Recorder::take_mistakes() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all = timeline.take_mistakes();
  all.insert(all.end(), mistakes_.begin(), mistakes_.end());
  mistakes_.clear();
  return all;
}

}  // namespace quire::graph
