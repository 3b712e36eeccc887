// Runs every kernel once under ThreadSanitizer, which sees what two threads of a threadgroup touch
// without a barrier between them. It has room for fewer threads than the device: decode_split runs
// with half its threads here (the Makefile changes that one number).
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../../../metal_ext/kernels/metal/arguments.h"
#include "../msl/launch.h"

namespace {

using namespace quire::metal;

constexpr uint32_t kHeadDim = 64;
constexpr uint32_t kKVHeads = 2;
constexpr uint32_t kQueryHeads = 20;  // two tiles of 6 per KV head
constexpr uint32_t kRowElements = kKVHeads * kHeadDim;
constexpr uint32_t kTokens = 300;  // of the longest sequence: three splits
constexpr uint32_t kBlockShift = 4;
constexpr uint32_t kBlockTokens = 1 << kBlockShift;
constexpr uint32_t kThreads = kDecodeThreads / 2;

using Numbers = std::vector<uint16_t>;  // of bfloat

struct Grid {
  unsigned size[3];
  unsigned threads[3];
  bool counts_threads = false;
};

void run(const std::string& name, std::vector<void*> buffers, const Grid& grid) {
  const msl_kernel* const kernel = find_launcher(name.c_str());
  if (kernel == nullptr) {
    std::fprintf(stderr, "%s is not linked\n", name.c_str());
    std::abort();
  }
  const msl_launch launch = grid.counts_threads ? kernel->over_threads : kernel->over_threadgroups;
  launch(buffers.data(), grid.size, grid.threads);
}

// Two sequences: 300 tokens and 40, whose rows are found in one of the three ways.
struct Sequences {
  Numbers memory = Numbers(2 * 2 * 320 * kRowElements, 0x3c00);
  std::vector<uint64_t> pages;
  std::vector<RowEntry> rows;
  LayerPlace place;

  explicit Sequences(const std::string& kind) {
    const uint64_t region = 320 * kRowElements * sizeof(uint16_t);
    place = {0, region, kRowElements * sizeof(uint16_t), kBlockShift};
    const auto start = reinterpret_cast<uint64_t>(memory.data());
    for (uint32_t position : {kTokens - 1, 39u}) {
      const uint64_t base = rows.size() * 2 * region;
      const auto first_page = static_cast<uint32_t>(pages.size());
      rows.push_back({kind == "sparse" ? start + base : base, position, first_page});
      for (uint32_t token = 0; token < 320; token += kBlockTokens) {
        pages.push_back(start + base + token * place.row_bytes);
      }
    }
  }
};

void decode(const std::string& kind) {
  Sequences all(kind);
  Numbers queries(2 * kQueryHeads * kHeadDim, 0x3c00);
  Numbers out(queries.size());
  std::vector<DecodeTask> tasks{{0, 0}, {0, 1}, {0, 2}, {1, 0}};
  std::vector<uint32_t> first_task{0, 3, 4};
  std::vector<float> sums(4 * kQueryHeads * kHeadDim);
  std::vector<float> softened(4 * kQueryHeads * 2);
  AttentionArguments arguments{all.place, kQueryHeads, kKVHeads, 0, 0.125f, 2.0f, 0, 1, 0};
  std::vector<float> sinks(kQueryHeads);
  run("decode_split_bfloat_bfloat_64_6_" + kind,
      {queries.data(), tasks.data(), all.rows.data(), all.pages.data(), all.memory.data(),
       sums.data(), softened.data(), out.data(), &arguments, sinks.data()},
      {{kKVHeads * 2, 4, 1}, {kThreads, 1, 1}});
  run("decode_combine_bfloat_64",
      {sums.data(), softened.data(), first_task.data(), out.data(), &arguments, sinks.data()},
      {{kQueryHeads, 2, 1}, {32, 1, 1}});
}

void write(const std::string& kind) {
  Sequences all(kind);
  Numbers queries(2 * kQueryHeads * kHeadDim, 0x3c00);
  Numbers keys(2 * kRowElements, 0x3c00);
  Numbers values = keys;
  std::vector<float> weight(kHeadDim, 1.0f);
  Numbers out(queries.size());
  ProjectArguments project{
      all.place, kQueryHeads, kKVHeads, 2, 1, 2, 1e-6f, 1.0f, 0, {1.0f, 0.5f}};
  run("project_append_bfloat_bfloat_64_" + kind,
      {queries.data(), keys.data(), values.data(), weight.data(), weight.data(), all.rows.data(),
       all.pages.data(), all.memory.data(), out.data(), &project},
      {{kQueryHeads + kKVHeads, 2, 1}, {32, 1, 1}});
  AppendArguments append{all.place, kRowElements, 2};
  run("append_bfloat_bfloat_" + kind,
      {keys.data(), values.data(), all.rows.data(), all.pages.data(), all.memory.data(), &append},
      {{kRowElements / 4, 2, 1}, {32, 2, 1}, true});
  Numbers all_keys(40 * kRowElements);
  Numbers all_values(40 * kRowElements);
  GatherArguments gather{all.place, kRowElements, 40, 1, 0};
  run("gather_bfloat_" + kind,
      {all.rows.data(), all.pages.data(), all.memory.data(), all_keys.data(), all_values.data(),
       &gather},
      {{kRowElements / 4, 40, 1}, {32, 4, 1}, true});
}

// Of 40 rows, which have more pairs than route has threads.
void mixture() {
  constexpr uint32_t kRows = 40, kExperts = 16, kChosen = 8, kInner = 32, kHidden = 64;
  constexpr uint32_t kPairs = kRows * (kChosen + 1);
  constexpr uint32_t kTiles = (kRows * kChosen + 3 * kExperts) / 4 + 10;
  Numbers logits(kRows * kExperts);
  for (size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<uint16_t>(0x3c00 + i * 37 % 256);
  }
  std::vector<float> weights(kRows * kChosen);
  std::vector<uint32_t> order(kPairs);
  std::vector<ExpertTile> tiles(kTiles);
  RouteArguments route{kRows, kExperts, kChosen, 1, 1, kTiles};
  run("route_bfloat", {logits.data(), weights.data(), order.data(), tiles.data(), &route},
      {{1, 1, 1}, {kRouteThreads, 1, 1}});
  Numbers x(kRows * kHidden, 0x3c00);
  Numbers m(kExperts * kInner * kHidden, 0x3c00);  // any matrix, its scales and biases
  Numbers inner(kPairs * kInner);
  std::vector<float> products(kPairs * kHidden);
  Numbers out(x.size());
  void* const w = m.data();
  ExpertArguments gates{kHidden, kInner, kInner, kExperts, kRows * kChosen, kChosen, 5, 1, 0, 0};
  run("expert_gates_bfloat_affine4_4",
      {x.data(), order.data(), tiles.data(), w, w, w, w, w, w, w, w, w, w, w, w, w, w,
       inner.data(), &gates},
      {{kTiles, kInner / kGateOutputs, 1}, {kProductThreads, 1, 1}});
  ExpertArguments downs{kInner, kHidden, kHidden, kExperts, kRows * kChosen, kChosen, 5, 1, 0, 0};
  run("expert_downs_bfloat_affine4_4",
      {inner.data(), order.data(), tiles.data(), w, w, w, w, w, w, w, products.data(), &downs},
      {{kTiles, kHidden / kProductOutputs, 1}, {kProductThreads, 1, 1}});
  MixArguments mix{kHidden, kRows, kChosen, 1};
  run("mix_bfloat", {products.data(), weights.data(), w, x.data(), out.data(), &mix},
      {{kHidden / 4, kRows, 1}, {16, 4, 1}, true});
}

void blocks() {
  std::vector<uint64_t> source(4 * 128);
  std::vector<uint64_t> target(4 * 128);
  BlockArguments arguments{
      reinterpret_cast<uint64_t>(source.data()), reinterpret_cast<uint64_t>(target.data()), 1024,
      1024, 1024, 4, 0};
  run("copy_blocks", {&arguments}, {{64, 4, 1}, {32, 2, 1}, true});
  run("zero_blocks", {&arguments}, {{64, 4, 1}, {32, 2, 1}, true});
}

}  // namespace

int main() {
  for (const char* kind : {"sparse", "dense", "paged"}) {
    decode(kind);
    write(kind);
  }
  mixture();
  blocks();
  std::puts("every kernel has run under ThreadSanitizer");
  return 0;
}
