#include "timeline.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace quire::graph {

Encoder Timeline::open_encoder() {
  encoders_.emplace_back();
  return encoders_.size() - 1;
}

void Timeline::barrier() { ++encoders_.back().barriers; }

void Timeline::close_encoder(const std::set<Encoder>& waited_for) {
  EncoderState& closing = encoders_.back();
  closing.open = false;
  for (const Encoder encoder : waited_for) {
    closing.before.insert(encoder);
    const EncoderState& other = encoders_[encoder];
    if (other.commands > 0) {
      closing.before.insert(other.before.begin(), other.before.end());
    }
  }
  for (const Need& need : std::exchange(pending_, {})) {
    if (!ordered(need.first, need.second)) {
      report(need);
    }
  }
}

Command Timeline::add(std::string what) {
  EncoderState& encoder = encoders_.back();
  ++encoder.commands;
  commands_.push_back({std::move(what), encoders_.size() - 1, encoder.barriers});
  return commands_.size() - 1;
}

bool Timeline::ordered(Command first, Command second) const {
  const Step& one = commands_[first];
  const Step& other = commands_[second];
  if (completed_.contains(one.encoder)) {
    return true;
  }
  return one.encoder == other.encoder ? one.barriers < other.barriers
                                      : encoders_[other.encoder].before.contains(one.encoder);
}

void Timeline::need(const Need& need) {
  const bool settled = commands_[need.first].encoder == commands_[need.second].encoder;
  if (!settled) {
    pending_.push_back(need);  // which fences the encoder waits for is known at its end
  } else if (!ordered(need.first, need.second)) {
    report(need);
  }
}

void Timeline::report(const Need& need) {
  const Step& first = commands_[need.first];
  const Step& second = commands_[need.second];
  const bool same = first.encoder == second.encoder;
  const std::string mistake = second.what + " " + need.what + " " + first.what + ", with no " +
                              (same ? "barrier" : "fence") + " between them";
  if (std::find(mistakes_.begin(), mistakes_.end(), mistake) == mistakes_.end()) {
    mistakes_.push_back(mistake);
  }
}

void Timeline::cut(uint64_t address) {
  const auto after = spans_.upper_bound(address);
  if (after == spans_.begin()) {
    return;
  }
  const auto at = std::prev(after);
  if (at->first < address && address < at->second.end) {
    spans_.emplace(address, at->second);
    at->second.end = address;
  }
}

void Timeline::uses(Command second, Command first) {
  if (first != second) {
    need({first, second, "reads what is written by"});
  }
}

void Timeline::reads(Command command, uint64_t address, uint64_t bytes) {
  cut(address);
  cut(address + bytes);
  for (auto at = spans_.lower_bound(address); at != spans_.end() && at->first < address + bytes;
       ++at) {
    at->second.readers.insert(command);
    if (at->second.writer != command) {
      need({at->second.writer, command, "reads what is written by"});
    }
  }
}

void Timeline::writes(Command command, uint64_t address, uint64_t bytes) {
  cut(address);
  cut(address + bytes);
  auto at = spans_.lower_bound(address);
  while (at != spans_.end() && at->first < address + bytes) {
    if (at->second.writer != command) {
      need({at->second.writer, command, "writes what is written by"});
    }
    for (const Command reader : at->second.readers) {
      if (reader != command) {
        need({reader, command, "writes what is read by"});
      }
    }
    at = spans_.erase(at);
  }
  spans_.emplace(address, Span{address + bytes, command, {}});
}

std::set<Encoder> Timeline::signal(
    const std::set<Encoder>& command_buffer, const std::string& what) {
  std::set<Encoder> before;
  for (const Encoder encoder : command_buffer) {
    before.insert(encoder);
    if (encoders_[encoder].commands > 0) {
      before.insert(encoders_[encoder].before.begin(), encoders_[encoder].before.end());
    }
  }
  for (Encoder encoder = 0; encoder < encoders_.size(); ++encoder) {
    if (encoders_[encoder].commands > 0 && !before.contains(encoder) &&
        !completed_.contains(encoder)) {
      mistakes_.push_back(what + " while commands before it may still run");
      break;
    }
  }
  return before;
}

void Timeline::complete(const std::set<Encoder>& encoders) {
  completed_.insert(encoders.begin(), encoders.end());
  for (auto& [address, span] : spans_) {
    std::erase_if(span.readers, [this](Command command) {
      return completed_.contains(commands_[command].encoder);
    });
  }
}

std::set<Encoder> Timeline::closed() const {
  std::set<Encoder> found;
  for (Encoder encoder = 0; encoder < encoders_.size(); ++encoder) {
    if (!encoders_[encoder].open) {
      found.insert(encoder);
    }
  }
  return found;
}

std::vector<std::string> Timeline::take_mistakes() { return std::exchange(mistakes_, {}); }

}  // namespace quire::graph
