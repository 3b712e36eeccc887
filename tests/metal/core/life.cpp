#include "life.h"

#include <algorithm>

#include "check.h"

namespace quire::metal {
namespace {

constexpr size_t kMostHeaps = 6;

fake::Options machine_of(const Life::Options& options) {
  fake::Options machine;
  machine.seed = options.seed * 7 + 1;
  machine.background = options.threads;
  machine.slowness = static_cast<unsigned>(options.seed % 7);
  machine.lacks = options.lacks;
  if (options.few_sets) {
    machine.working_set_bytes = uint64_t{10} << 20;  // a set holds two heaps
  }
  return machine;
}

KVBackend::Options shape_of(const Life::Options& options, size_t ranges) {
  return {.kind = options.kind,
          .geometry = small_geometry(options.kind, options.row_bytes),
          .max_ranges = ranges,
          .maps_beside_steps = options.bold,
          .max_buffer_bytes = options.max_buffer_bytes,
          .timeout = options.timeout,
          .residency = {.most_sets = options.few_sets ? 3 : Residency::kMostSets,
                        .keep = std::chrono::seconds(options.threads ? 10 : 0),
                        .interval = std::chrono::milliseconds(options.threads ? 1 : 500)}};
}

}  // namespace

Life::Life(const Options& options)
    : options_(options),
      quiet_(options.kind == Kind::sparse && !options.bold),
      random_(options.seed),
      bench_(options.kind, machine_of(options), shape_of(options, kMostSequences + 2)) {
  if (options_.threads) {
    hands_ = std::make_unique<ThreadHands>();
    return;
  }
  hands_ = std::make_unique<OwnHands>();
  // While the mapper waits for the device, the engine goes on.
  bench_.machine.while_waiting([this] {
    if (random(3) == 0) {
      act();
    }
  });
}

Life::Deeds Life::live() {
  for (unsigned i = 0; i < options_.actions; ++i) {
    act();
    CHECK_CASE(hands_->failure().empty(), hands_->failure());
    bench_.require_no_mistakes();
  }
  if (random(2) == 0) {
    settle();
    for (const SequencePtr& sequence : std::vector(sequences_)) {
      check_at_rest(sequence);
    }
  }
  if (random(2) == 0) {
    finish_mappings();  // else the end finds maps that were never made
  }
  // What is left to do may wait for a step that fails meanwhile. Hands of one thread wait inside of
  // work().
  bench_.machine.while_waiting([this] { notice(); });
  while (hands_->work()) {
    notice();
  }
  bench_.machine.while_waiting(nullptr);
  CHECK_CASE(hands_->failure().empty(), hands_->failure());
  notice();
  if (faults_) {
    settle();  // whoever ends has noticed what failed
  }
  let_go();
  bench_.end();
  return deeds_;
}

void Life::live_until_silence() {
  for (auto left = random(options_.actions); left > 0; --left) {
    act();
  }
  bench_.require_no_mistakes();
  bench_.machine.freeze(true);
  bench_.give_up();
  std::map<std::string, size_t> before = bench_.machine.alive();
  // At a mapping point nothing begins that would wait for the steps.
  auto left = quiet_ ? options_.actions : ~0U;
  try {
    while (hands_->failure().empty() && (hands_->work() || !steps_.empty()) && left-- > 0) {
      before = bench_.machine.alive();
      act();
    }
  } catch (const std::runtime_error&) {
    CHECK(!bench_.kv_backend->failure().empty());  // what a failed backend is asked for
  }
  bench_.machine.while_waiting(nullptr);
  const bool ended = bench_.kv_backend->shutdown();
  CHECK(ended == bench_.kv_backend->failure().empty());
  let_go();
  bench_.kv_backend.reset();
  for (const char* kept : {"MTLHeap", "MTLBuffer", "MTL4CommandQueue", "MTLResidencySet"}) {
    CHECK_CASE(ended || bench_.machine.alive()[kept] >= before[kept], kept);
  }
  bench_.require_no_mistakes();
}

void Life::act() {
  if (acting_) {
    return;
  }
  acting_ = true;
  notice();
  const auto act = random(16);
  constexpr uint64_t kMapping[] = {1, 2, 4, 5, 6, 7, 13, 14, 15};
  const bool maps = std::find(std::begin(kMapping), std::end(kMapping), act) != std::end(kMapping);
  switch (maps && !at_point() ? 16 : act) {
    case 16:
      break;
    case 0:
      add_heap();
      break;
    case 1:
    case 2:
      open();
      break;
    case 3:
      evict();
      break;
    case 4:
      release_heap();
      break;
    case 5:
      if (const auto sequence = any_sequence()) {
        leave(sequence);
      }
      break;
    case 6:
      if (const auto sequence = any_sequence()) {
        fork(sequence);
      }
      break;
    case 7:
      if (const auto sequence = any_sequence()) {
        give_back_tail(sequence);
      }
      break;
    case 8:
      if (const auto sequence = any_sequence()) {
        check_at_rest(sequence);
      }
      break;
    case 9:
      bench_.machine.tick(static_cast<unsigned>(random(6)));
      if (!hands_->working() && !options_.threads) {  // else it comes between a request and its use
        bench_.machine.pass(std::chrono::milliseconds(random(2500)));
      }
      break;
    case 10:
      bench_.machine.refuse("newHeapWithDescriptor:", static_cast<int>(random(2)));
      bench_.machine.refuse("newBufferWithLength:options:", static_cast<int>(random(2)));
      break;
    case 11:
    case 12:
      step();
      break;
    default:
      if (const auto sequence = any_sequence()) {
        grow(sequence);
      }
      break;
  }
  acting_ = false;
  if (random(2) == 0) {
    hands_->work();
  }
}

void Life::add_heap() {
  if (heaps_.size() == kMostHeaps) {
    return;
  }
  try {
    const auto heap = bench_.kv_backend->new_heap();
    heaps_.push_back({heap, std::vector<BlockState>(heap->geometry().blocks_per_heap())});
  } catch (const std::system_error&) {  // refused: another time
  }
}

void Life::open() {
  const auto range = sequences_.size() < kMostSequences ? idle_range() : nullptr;
  if (range == nullptr) {
    return;
  }
  const auto sequence = std::make_shared<Sequence>(Sequence{.range = range});
  sequences_.push_back(sequence);
  if (options_.kind == Kind::dense || random(2) == 0) {
    return;
  }
  if (!prefixes_.empty() && random(2) == 0) {  // of one that has left
    const Prefix& prefix = *std::next(prefixes_.begin(), random(prefixes_.size()));
    sequence->stamps = prefix.stamps;
    share(sequence, prefix.blocks);
  } else if (const auto other = any_sequence()) {  // of one that is still there
    const size_t blocks = std::min(full_blocks(*other), random(4));
    sequence->stamps.assign(
        other->stamps.begin(),
        other->stamps.begin() + static_cast<ptrdiff_t>(blocks * per_block()));
    share(sequence, {other->blocks.begin(),
                     other->blocks.begin() + static_cast<ptrdiff_t>(blocks)});
  }
}

void Life::grow(const SequencePtr& sequence) {
  const size_t room = sequence->range->geometry().blocks_per_range() - sequence->blocks.size();
  if (sequence->pending > 0 || room == 0) {
    return;
  }
  const std::vector<Place> run = free_run(std::min<size_t>(room, 1 + random(3)));
  if (!run.empty()) {
    map_run(sequence, run, true);
  }
}

}  // namespace quire::metal
