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
#include <vector>

#include "core/metal/gpu.h"

namespace quire::metal {

using Clock = std::function<std::chrono::steady_clock::time_point()>;

// Calls a function again and again while something is in use, and for a while after, on a thread of
// its own.
class Heartbeat {
 public:
  // interval: between calls. keep: how long after the last use.
  Heartbeat(
      std::chrono::nanoseconds interval, std::chrono::nanoseconds keep, Clock now,
      std::function<void()> beat);
  // Waits for a call that is being made.
  ~Heartbeat();

  // Any thread; waits for nothing.
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
  std::atomic<bool> sleeps_{false};  // until the next use
  bool stopping_ = false;
  std::thread thread_;
};

// One of the device's residency sets, what is in it, and the queues that have it. One thread at a
// time; but for request(), nothing here may be done while a command in flight has the set, except
// to give it to a queue.
class ResidentSet {
 public:
  static constexpr uint64_t kAnySize = std::numeric_limits<uint64_t>::max();

  struct Member {
    const MTL::Allocation* allocation;
    uint64_t bytes;  // of the working set
  };

  // Throws std::system_error(ENOMEM) where the device refuses.
  explicit ResidentSet(MTL::Device* device);

  // Takes members from the front as long as they fit, and one at least into an empty set. False
  // where that is none.
  bool fill(std::deque<Member>& waiting, uint64_t size);
  bool holds(const MTL::Allocation* allocation) const;
  const std::vector<Member>& members() const { return members_; }
  // Once per queue, then free.
  void put_on(MTL::CommandQueue* queue);
  void put_on(MTL4::CommandQueue* queue);
  // Off all queues, and empty; returns what was in it.
  std::vector<Member> empty();
  const NS::SharedPtr<MTL::ResidencySet>& set() const { return set_; }

  bool full = false;  // so that it stays as it is

 private:
  NS::SharedPtr<MTL::ResidencySet> set_;
  std::vector<Member> members_;
  uint64_t bytes_ = 0;
  std::set<MTL::CommandQueue*> queues_;
  std::set<MTL4::CommandQueue*> mapping_queues_;
};

// Keeps memory resident that kernels reach by address, because the system cannot see such uses, and
// the weights, because the system drops unused memory after a while. All of it is in residency
// sets. Every queue whose commands may touch it has the sets:
//
//   weights | weights | heaps | heaps | heaps and buffers
//   --- closed: nothing comes or goes ---|--- open, until a step begins
//
// Rule: the members of a set change only while no command in flight has the set; a Mac has been
// seen to go down where members came and went under commands. So memory that is made while steps
// run gets a set of its own, which stays open for other new memory until the next step begins. A
// set that loses a member is emptied while nothing runs, and filled again with the others.
//
// Without residency sets (macOS 14) it keeps a list of the resources that encoders must name.
class Residency {
 public:
  // A set has no more than this share of the working set: macOS makes whole sets resident, and one
  // large set has been seen to cost a step (MLX's pull request 4211, whose share this is).
  static constexpr uint64_t kSetPercent = 5;
  // A queue takes 32 sets (Metal's feature set tables). One is MLX's own, the others are spare.
  static constexpr size_t kMostSets = 24;
  // Sets that the weights leave to heaps and buffers.
  static constexpr size_t kLeftByWeights = 4;

  // macOS 26 takes wired memory back one second after its last use (llama.cpp's pull request
  // 17766, whose first interval this is).
  static constexpr std::chrono::milliseconds kInterval{500};

  struct Options {
    bool supported = false;  // Capabilities::residency_sets
    uint64_t working_set_bytes = 0;
    size_t most_sets = kMostSets;
    // How long after the last use residency is still requested; 0: not at all after it.
    std::chrono::nanoseconds keep = std::chrono::nanoseconds::zero();
    std::chrono::nanoseconds interval = kInterval;  // the longest without a use or a request
    Clock now = &std::chrono::steady_clock::now;
  };
  // health: nothing is requested of a device that has failed.
  Residency(MTL::Device* device, const Health& health, const Options& options);
  ~Residency() { end(); }

  // The most bytes of a set, where its members leave a choice; 0 where the device names no limit.
  uint64_t set_bytes() const { return set_bytes_; }
  // New memory, for the next settle(). bytes: what it takes of the working set. Any thread.
  void add(MTL::Buffer* buffer, uint64_t bytes);
  void add(MTL::Heap* heap, uint64_t bytes);

  // --- engine's thread ---------------------------------------------------------------------------
  // Buffers that stay until the end, in sets of their own. Once, before the first step. Throws
  // std::system_error(ENOMEM) where the device refuses.
  void hold(std::vector<NS::SharedPtr<MTL::Buffer>> buffers);
  // A step begins, over memory that was settled: closes the set that is open, and refreshes.
  void begin_step();
  // A queue on which steps run, before their commands are committed: gets the closed sets that it
  // has not got.
  void attach(MTL::CommandQueue* queue);
  // Without residency sets, the buffers that a compute encoder must be told to use; else empty.
  std::vector<MTL::Resource*> unattached() const;

  // --- mapper's thread ---------------------------------------------------------------------------
  // The queues of its own commands, which it waits for. Before there are sets.
  void attach_own(MTL4::CommandQueue* mapping, MTL::CommandQueue* work);
  // True where settle() would need one set more than there may be.
  bool crowded() const;
  // Makes room for sets: those that are not full are dropped, and made again as few. Nothing runs.
  void gather();
  // Puts added memory into the open set, or the next ones, and requests their residency. Throws
  // std::system_error(ENOMEM) where the device refuses: memory without a set stays added.
  void settle();
  // Before commands over settled memory are committed. Memory that was neither used nor requested
  // for a while may not be resident any more: its residency is requested again.
  void refresh();
  bool lapsed() const;  // true where refresh() will request it
  // Before the last reference goes. Nothing runs.
  void remove(MTL::Buffer* buffer);
  void remove(MTL::Heap* heap);

  // Off all queues, and empty. Nothing runs.
  void end();

 private:
  void remove_allocation(const MTL::Allocation* allocation);
  // Under changes_.
  void make_sets(size_t most);
  void ask_for_all();
  // Under books_, too.
  NS::SharedPtr<MTL::ResidencySet> fill(size_t most);
  void put_on_own(ResidentSet& set);
  void close();  // under books_ alone

  MTL::Device* const device_;
  const Health& health_;
  const Options options_;
  const uint64_t set_bytes_;
  // Held while sets are made, dropped or requested.
  std::mutex changes_;
  std::vector<ResidentSet> empty_;  // what gather() makes sets of
  mutable std::mutex books_;  // guards all that follows, and is never held for long
  std::vector<ResidentSet> sets_;
  bool open_ = false;           // the last set
  std::deque<ResidentSet::Member> waiting_;  // for a set
  std::vector<NS::SharedPtr<MTL::Buffer>> held_;
  uint64_t changed_ = 0;  // how often there was a closed set more
  std::unordered_map<MTL::CommandQueue*, std::pair<NS::SharedPtr<MTL::CommandQueue>, uint64_t>>
      queues_;  // and the value of changed_ that they have seen
  NS::SharedPtr<MTL4::CommandQueue> mapping_;
  NS::SharedPtr<MTL::CommandQueue> work_;
  std::vector<MTL::Resource*> unattached_;

  // When all sets were last in use or requested.
  std::atomic<std::chrono::steady_clock::time_point> fresh_;
  std::unique_ptr<Heartbeat> heartbeat_;  // null where nothing is kept
};

}  // namespace quire::metal
