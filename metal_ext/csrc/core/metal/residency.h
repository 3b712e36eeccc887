#pragma once

#include <Metal/Metal.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/metal/gpu.h"

// Keeps memory resident on the GPU, by means of Metal's residency sets.
namespace quire::metal {

using Clock = std::function<std::chrono::steady_clock::time_point()>;

// Calls a function repeatedly on a thread of its own, until use() has not been called for a while.
class Heartbeat {
 public:
  // `interval` is the time between calls. Calls go on for the time `keep` after the last use().
  Heartbeat(
      std::chrono::nanoseconds interval, std::chrono::nanoseconds keep, Clock now,
      std::function<void()> beat);
  // Waits until a call in progress has ended.
  ~Heartbeat();

  // Any thread may call this. The call never waits long.
  void use();

 private:
  bool in_use() const { return now_() - last_use_.load() < keep_; }
  void run();

  const std::chrono::nanoseconds interval_;
  const std::chrono::nanoseconds keep_;
  const Clock now_;
  const std::function<void()> beat_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::chrono::steady_clock::time_point> last_use_;
  std::atomic<bool> sleeps_{false};  // whether run() waits for the next use()
  bool stopping_ = false;
  std::thread thread_;
};

// A residency set: memory that the GPU keeps resident, and the queues that use the set. One thread
// at a time may call methods. While a command uses the set, no member may be added or removed, but
// put_on() may be called, and residency may be requested.
class ResidentSet {
 public:
  static constexpr uint64_t kAnySize = std::numeric_limits<uint64_t>::max();
  using Queue = std::variant<MTL::CommandQueue*, MTL4::CommandQueue*>;

  struct Member {
    const MTL::Allocation* allocation;
    uint64_t bytes;  // the member's size in the working set
  };

  explicit ResidentSet(MTL::Device* device);

  // Takes members from the front of `waiting` while they fit; an empty set takes at least one.
  // Returns false if the set took none.
  bool fill(std::deque<Member>& waiting, uint64_t size);
  const std::vector<Member>& members() const { return members_; }
  // Adds the set to a queue. A second call for the same queue does nothing.
  void put_on(Queue queue);
  // Removes the set from all queues and empties it. Returns the members.
  std::vector<Member> empty();
  const NS::SharedPtr<MTL::ResidencySet>& set() const { return set_; }

  bool full = false;  // a full set takes no more members

 private:
  NS::SharedPtr<MTL::ResidencySet> set_;
  std::vector<Member> members_;
  uint64_t bytes_ = 0;
  std::set<Queue> queues_;
};

// Keeps two kinds of memory resident. One is memory that kernels use by address, because the system
// does not detect such uses. The other is the weights, because the system drops idle memory. Each
// command queue that may use the memory has all sets:
//   weights | weights | heaps | heaps | heaps and buffers
//   --- closed: no member comes or goes ---|--- open, until a step begins
// Rule: a set's members change only while no running command uses the set, because other changes
// have crashed a Mac. New memory therefore goes into a set of its own, open until the next step
// begins. To remove a member, a set is emptied and filled again while no command runs. Without
// residency sets (macOS 14), unattached() lists the resources that encoders must use.
class Residency {
 public:
  // Largest size of a set, in percent of the GPU's usable memory. macOS makes whole sets resident,
  // and one large set delayed a step (MLX's pull request 4211, from which this number comes).
  static constexpr uint64_t kSetPercent = 5;
  // A queue takes 32 sets (Metal's feature set tables). MLX uses one, and seven stay unused.
  static constexpr size_t kMostSets = 24;
  // The least number of sets that the weights leave to heaps and buffers.
  static constexpr size_t kLeftByWeights = 4;

  // Less than the 1 s after which macOS 26 unwires unused memory (llama.cpp's pull request 17766).
  static constexpr std::chrono::milliseconds kInterval{500};

  struct Options {
    bool supported = false;  // Capabilities::residency_sets
    uint64_t working_set_bytes = 0;
    size_t most_sets = kMostSets;
    // The time for which residency is requested after the last use. 0 turns requests off.
    std::chrono::nanoseconds keep = std::chrono::nanoseconds::zero();
    std::chrono::nanoseconds interval = kInterval;  // the longest time without a use or a request
    Clock now = &std::chrono::steady_clock::now;
  };
  // Once `health` has recorded a failure of the device, no residency is requested any more.
  Residency(MTL::Device* device, const Health& health, const Options& options);
  ~Residency() { end(); }

  // Returns the largest size of a set of several members in bytes, or 0 if there is no limit.
  uint64_t set_bytes() const { return set_bytes_; }
  // Adds new memory for settle(). Any thread may call this. `bytes` counts towards the working set.
  void add(MTL::Allocation* memory, uint64_t bytes);

  // --- Engine's thread ---
  // Keeps buffers resident in sets of their own until end(). Called once, before the first step.
  // Throws std::system_error(ENOMEM) if the device refuses.
  void hold(std::vector<NS::SharedPtr<MTL::Buffer>> buffers);
  // Begins a step: closes the open set, and calls refresh().
  void begin_step();
  // Adds the closed sets to a step's queue. Called before the step's commands are committed.
  void attach(MTL::CommandQueue* queue);
  // Returns the buffers that a compute encoder must list on a system without residency sets.
  std::vector<MTL::Resource*> unattached() const;

  // --- Mapper's thread ---
  // Sets the queues of our own commands, besides steps. Called before any set exists.
  void attach_own(std::vector<ResidentSet::Queue> queues);
  // Returns true if settle() would need more sets than allowed.
  bool crowded() const;
  // Merges the sets that are not full into fewer sets. Called while no command runs.
  void gather();
  // Puts added memory into sets, and requests their residency. Throws std::system_error(ENOMEM) if
  // the device refuses. Memory without a set is then kept for the next call.
  void settle();
  // Requests residency again if the last use or request was a while ago. Called before
  // commands are committed.
  void refresh();
  bool lapsed() const;  // true when refresh() would request residency
  // Removes memory from its set, before the memory is released. Called while no command runs.
  void remove(const MTL::Allocation* memory);

  // Empties all sets and removes them from all queues. Called while no command runs.
  void end();

 private:
  // The caller must hold changes_.
  void make_sets(size_t most);
  void ask_for_all();
  // The caller must hold changes_ and books_.
  NS::SharedPtr<MTL::ResidencySet> fill(size_t most);
  void put_on_own(ResidentSet& set);
  void close();  // the caller holds books_ alone

  MTL::Device* const device_;
  const Health& health_;
  const Options options_;
  const uint64_t set_bytes_;
  // Held while sets are made or emptied, or their residency is requested.
  std::mutex changes_;
  std::vector<ResidentSet> empty_;  // spare sets for make_sets()
  mutable std::mutex books_;  // guards the members below; never held for long
  std::vector<ResidentSet> sets_;
  bool open_ = false;           // whether the last set is open
  std::deque<ResidentSet::Member> waiting_;  // members without a set
  std::vector<NS::SharedPtr<MTL::Buffer>> held_;
  uint64_t changed_ = 0;  // the number of closed sets so far
  std::unordered_map<MTL::CommandQueue*, std::pair<NS::SharedPtr<MTL::CommandQueue>, uint64_t>>
      queues_;  // each with the value of changed_ that it has seen
  std::vector<ResidentSet::Queue> own_;  // Context keeps them until end()
  std::vector<MTL::Resource*> unattached_;

  // The last time at which all sets were used, or the residency of all was requested.
  std::atomic<std::chrono::steady_clock::time_point> fresh_;
  std::unique_ptr<Heartbeat> heartbeat_;  // null without residency sets, and if `keep` is 0
};

}  // namespace quire::metal
