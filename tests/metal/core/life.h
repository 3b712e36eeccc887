#pragma once

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "bench.h"
#include "hands.h"

namespace quire::metal {

// One life of an engine and its cache over a backend, by a seed: sequences come, grow, are
// forked, share prefixes and leave; steps overlap; the device refuses memory and fails steps; heaps
// are released and made again. The engine keeps to the rules; whether the core does is seen by what
// steps read, and by what the machine reports.
class Life {
 public:
  struct Options {
    Kind kind;
    uint64_t seed;
    bool threads = false;  // the mapper's and the device's own
    // Whether mappings change beside steps: else only while none is in flight, in bundles.
    bool bold = false;
    unsigned actions = 150;
    std::vector<int64_t> row_bytes = {1024, 1024, 1024, 1024};
    size_t max_buffer_bytes = 0;
    std::set<std::string> lacks = {};
    bool few_sets = false;  // residency sets, and small ones
    std::chrono::milliseconds timeout = std::chrono::seconds(20);
  };
  // How often a life came to what it is lived for.
  struct Deeds {
    unsigned writable_maps = 0;
    unsigned shared_maps = 0;
    unsigned refused_maps = 0;
    unsigned unmaps_in_flight = 0;  // asked for while a step of the sequence ran
    unsigned copies = 0;
    unsigned steps = 0;
    unsigned failed_steps = 0;
    unsigned overlapping_steps = 0;
    unsigned released_heaps = 0;
    unsigned remade_heaps = 0;
    unsigned steps_while_mapping = 0;  // begun while the mapper waited for the device
    unsigned bundles = 0;              // of several maps
    void add(const Deeds& other);
    // Of those that were never done.
    std::vector<std::string> missing(const Options& options) const;
    std::string text() const;
  };

  explicit Life(const Options& options);
  // Lives it, ends it, and checks that nothing is left. Throws what went wrong.
  Deeds live();
  // The same until the device falls silent at some moment. Checks that the backend says so in the
  // end, and that nothing is released from then on, whoever lets go of what.
  void live_until_silence();

 private:
  struct Place {
    size_t heap;
    size_t block;
    bool operator==(const Place&) const = default;
  };
  struct BlockState {
    unsigned users = 0;  // sequences and prefixes that have it, a pending operation included
  };
  struct HeapState {
    std::shared_ptr<Heap> heap;
    std::vector<BlockState> blocks;
  };
  struct Sequence {
    std::shared_ptr<AddressRange> range;
    std::vector<Place> blocks = {};
    size_t mapped = 0;  // blocks whose mapping is done
    std::vector<uint64_t> stamps = {};
    std::vector<uint64_t> written = {};  // of each block, the last epoch that writes it
    std::set<uint64_t> epochs = {};      // whose failure makes the rows worthless
    unsigned pending = 0;                // operations on its mappings
    unsigned pinned = 0;                 // copies that read it, or are to fill it
    bool failing = false;    // a step of it is to fail, or has
    bool worthless = false;  // the engine has noticed
    bool leaving = false;
  };
  struct Prefix {
    std::vector<Place> blocks;
    std::vector<uint64_t> stamps;
  };
  struct Ticket {
    uint64_t number;
    std::function<void(bool refused)> then;
  };
  using SequencePtr = std::shared_ptr<Sequence>;
  static constexpr size_t kMostSequences = 6;

  // --- what the engine does --------------------------------------------------------------------
  void act();
  void add_heap();
  void open();
  void grow(const SequencePtr& sequence);
  void step();
  void fork(const SequencePtr& parent);
  void give_back_tail(const SequencePtr& sequence);
  void leave(const SequencePtr& sequence);
  void evict();
  void release_heap();
  void check_at_rest(const SequencePtr& sequence);
  void notice();  // which tickets and epochs are done
  void lose(uint64_t epoch);
  void let_go();  // of all that the engine holds
  void settle();  // lets everything that was begun come to its end

  // --- books -----------------------------------------------------------------------------------
  void submit(std::function<void()> operation, std::function<void(bool refused)> then);
  // Whether mappings may be changed now. Waits a little for steps where they must not be in flight.
  bool at_point();
  void finish_mappings();  // submits it
  // Whether all that was submitted is done, where a step must not begin before that.
  bool leave_point();
  SequencePtr any_sequence();
  std::shared_ptr<AddressRange> idle_range();
  std::vector<Place> free_run(size_t most);
  void share(const SequencePtr& sequence, const std::vector<Place>& blocks);
  void map_run(const SequencePtr& sequence, const std::vector<Place>& run, bool writable);
  void unmap_tail(const SequencePtr& sequence, size_t keep, std::function<void()> then);
  void drop(const std::vector<Place>& blocks);
  size_t full_blocks(const Sequence& sequence) const;  // sealed, or could be
  uint64_t random(uint64_t below) { return random_() % below; }
  size_t per_block() const { return bench_.kv_backend->geometry().tokens_per_block(); }

  const Options options_;
  const bool quiet_;
  std::mt19937_64 random_;
  Bench bench_;
  std::unique_ptr<Hands> hands_;
  std::vector<HeapState> heaps_;
  std::vector<std::shared_ptr<AddressRange>> idle_;
  std::vector<SequencePtr> sequences_;
  std::vector<SequencePtr> leaving_;
  std::list<Prefix> prefixes_;
  std::vector<Bench::Step> steps_;
  std::list<Ticket> tickets_;
  std::deque<uint64_t> finishes_;  // tickets of those that are submitted
  uint64_t finished_ = 0;          // the newest that is done
  unsigned begun_maps_ = 0;        // since the last of them
  uint64_t noticed_epoch_ = 0;  // complete, and looked at
  uint64_t next_stamp_ = 1;
  Deeds deeds_;
  bool acting_ = false;
  bool faults_ = false;  // a step has been made to fail
};

}  // namespace quire::metal
