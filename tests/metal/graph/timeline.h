#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

// What runs before what on a device that keeps no order of its own: commands of an encoder run at the
// same time but for barriers, encoders but for fences, and the host knows that something has run when
// an event has told it. Every use of memory is held against that.
namespace quire::graph {

using Encoder = size_t;
using Command = size_t;

class Timeline {
 public:
  Encoder open_encoder();
  // Commands of the encoder that come later run after those that came before.
  void barrier();
  bool is_open() const { return !encoders_.empty() && encoders_.back().open; }
  // The encoder runs after those whose fences it has waited for. Their own predecessors count only
  // where they have a command: an encoder without one may be left out, and then waits for nobody.
  void close_encoder(const std::set<Encoder>& waited_for);

  Command add(std::string what);
  // The second uses what the first one wrote.
  void uses(Command second, Command first);
  // Bytes of memory that no array owns.
  void reads(Command command, uint64_t address, uint64_t bytes);
  void writes(Command command, uint64_t address, uint64_t bytes);

  // Encoders that a signal behind the last closed encoder would come after, those of its command
  // buffer given. Reports those that it would not.
  std::set<Encoder> signal(const std::set<Encoder>& command_buffer, const std::string& what);
  // The host has seen that these have run.
  void complete(const std::set<Encoder>& encoders);
  bool completed(Encoder encoder) const { return completed_.contains(encoder); }
  // All that are closed.
  std::set<Encoder> closed() const;

  std::vector<std::string> take_mistakes();

 private:
  struct Step {
    std::string what;
    Encoder encoder;
    size_t barriers;  // of the encoder, before it
  };
  struct EncoderState {
    size_t commands = 0;
    size_t barriers = 0;
    bool open = true;
    std::set<Encoder> before;
  };
  struct Span {
    uint64_t end;
    Command writer;
    std::set<Command> readers;
  };
  // `second` needs what `first` did, or must not disturb it.
  struct Need {
    Command first;
    Command second;
    const char* what;
  };
  using Spans = std::map<uint64_t, Span>;

  void need(const Need& need);
  bool ordered(Command first, Command second) const;
  void report(const Need& need);
  // Cuts the span that the address lies in, so that one begins there.
  void cut(uint64_t address);

  std::vector<EncoderState> encoders_;
  std::vector<Step> commands_;
  Spans spans_;
  std::vector<Need> pending_;  // of the open encoder
  std::set<Encoder> completed_;
  std::vector<std::string> mistakes_;
};

}  // namespace quire::graph
