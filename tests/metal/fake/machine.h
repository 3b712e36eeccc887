#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

namespace quire::fake {

class Buffer;
class CommandBuffer;
class Object;
class WorkQueue;

// A part of the device's memory that a command reads or writes, by GPU address.
struct Access {
  uint64_t address;
  uint64_t bytes;
  bool write;
};

struct Options {
  uint64_t seed = 1;
  // Whether a thread of its own runs the device. Else it runs while the host waits, and a wait that
  // nothing could end any more ends at once.
  bool background = false;
  // How many turns a piece of work may let pass, at random, beyond those it has to.
  unsigned slowness = 3;

  std::string name = "Fake M1";
  std::vector<int64_t> families = {1007, 5001, 5002};
  uint64_t max_buffer_bytes = uint64_t{1} << 33;
  uint64_t working_set_bytes = uint64_t{1} << 33;
  uint64_t memory_bytes = uint64_t{1} << 30;  // of heaps and plain buffers together
  bool placement_sparse = true;
  bool unified_memory = true;
  // Whether mappings may change of what a command in flight may touch, if it does not.
  bool maps_beside_commands = false;
  // What is not answered: "MTLDevice newMTL4CommandQueue".
  std::set<std::string> lacks = {};
};

// One computer with one GPU, as far as quire can tell. There is one at a time; tests make their
// own. Every rule that host code breaks is reported in words, and kept.
class Machine {
 public:
  explicit Machine(Options options = {});
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  // The newest, or one with a thread of its own where no test has made one.
  static Machine& current();

  const Options& options() const { return options_; }
  bool lacks(const std::string& name, const char* selector) const;
  // The device makes no such object the next so many times: "newHeapWithDescriptor:".
  void refuse(const std::string& selector, int times) { refuse_after(selector, 0, times); }
  // The same, after it has made so many.
  void refuse_after(const std::string& selector, int made, int times);
  bool refuses(const std::string& selector);

  // --- what was found --------------------------------------------------------------------------
  void report(const std::string& mistake);
  std::vector<std::string> errors() const;
  // The same, and forgets them.
  std::vector<std::string> take_errors();
  // Objects that live, by class; autorelease pools and what is in them aside.
  std::map<std::string, size_t> alive() const;

  // --- time ------------------------------------------------------------------------------------
  // Lets the device do at most so much; false where there was nothing to do.
  bool tick(unsigned times = 1);
  // Until there is nothing left to do; reports what can never be done.
  void run();
  // The device does nothing from now on.
  void freeze(bool frozen);
  // No mapping is made from now on; commands run.
  void stall_mappings();
  bool mappings_stalled() const { return mappings_stalled_; }
  // What else happens while the host waits for the device, in the same thread. Not in background.
  void while_waiting(std::function<void()> hook);
  // Options::maps_beside_commands, from now on.
  void allow_maps_beside_commands(bool allowed);
  bool maps_beside_commands() const { return maps_beside_commands_; }
  // The next command buffer that is committed fails with these words.
  void fail_next_commands(const std::string& words);
  bool wait_until(const std::function<bool()>& done, std::chrono::milliseconds limit);

  // Time goes by, of which the device takes notice: it stands still otherwise.
  void pass(std::chrono::nanoseconds time);
  // The same clock, for the host.
  std::chrono::steady_clock::time_point time() const;

  // What a kernel touches, from its bound arguments, so that it can be checked before it runs.
  using Describe = std::function<std::vector<Access>(void* const* buffers)>;
  void describe_kernel(const std::string& host_name, Describe describe);

  // --- for the parts of the machine; under the mutex -------------------------------------------
  std::recursive_mutex mutex;
  uint64_t random(uint64_t below);
  void born(Object* object);
  void died(Object* object);
  void changed() { changed_.notify_all(); }
  void add_queue(WorkQueue* queue) { queues_.push_back(queue); }
  void remove_queue(WorkQueue* queue);
  bool charge(uint64_t bytes);  // false where memory is full
  void discharge(uint64_t bytes) { charged_ -= bytes; }
  std::string take_failure();
  const Describe* description(const std::string& host_name) const;

  std::chrono::nanoseconds now = std::chrono::hours(1);
  uint64_t residency_requests = 0;
  // How often mappings were changed, command buffers committed, and events waited for.
  uint64_t mapping_batches = 0;
  uint64_t commits = 0;
  uint64_t waits = 0;
  std::map<uint64_t, Buffer*> addresses;  // by GPU address
  std::set<CommandBuffer*> in_flight;                  // committed, and not completed

 private:
  bool tick_once();
  void drop_corpses(size_t count);  // the oldest

  const Options options_;
  std::mt19937_64 random_;
  std::condition_variable_any changed_;
  struct Refusals {
    int made_before;
    int times;
  };
  std::map<std::string, Refusals> refusals_;
  std::vector<std::string> errors_;
  std::unordered_set<Object*> alive_;
  std::vector<Object*> corpses_;
  std::vector<WorkQueue*> queues_;
  std::map<std::string, Describe> descriptions_;
  std::function<void()> hook_;
  std::string failure_;
  uint64_t charged_ = 0;
  bool frozen_ = false;
  bool mappings_stalled_ = false;
  bool maps_beside_commands_;
  bool in_hook_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

inline void report(const std::string& mistake) { Machine::current().report(mistake); }

}  // namespace quire::fake
