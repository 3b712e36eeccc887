#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "ops/checks.h"
#include "ops/primitive.h"

// Attention on a CPU: over splits of the keys for single rows, and over chunks of many rows.
namespace quire::ops {
namespace {

// Calls that read fewer bytes of K and V use one thread, because waking helpers costs more.
constexpr size_t kParallelKVBytes = size_t{256} << 10;
// The most splits (of kSplitTokens keys) in a task. Prefetches run on into a task's next split.
constexpr size_t kMaxSplitsPerTask = 8;
constexpr size_t kTasksPerThread = 4;
constexpr size_t kFewTasksPerThread = 2;

struct Attention {
  Rows rows;
  size_t first_row;
  Layer layer;
  cpu::HeadShape shape;
  float scale;
  cpu::Softmax softmax;  // its sinks are known when the call runs
  Workers workers;

  const void* keys(const RowTable::Row& row) const {
    return row.region(static_cast<size_t>(layer.key_region));
  }
  const void* values(const RowTable::Row& row) const {
    return row.region(static_cast<size_t>(layer.value_region));
  }
  // Writes a row of the queries to `prepared`, scaled and in the order that kernels read.
  void prepare(const mx::array& queries, size_t row, float* copy, float* prepared) const {
    workers->kernels.prepare_queries(
        shape, row_as_floats(queries, row, workers->kernels, copy), scale, prepared);
  }
  void store(const float* result, mx::array& out, size_t first, size_t count) const {
    const size_t offset = first * shape.query_floats();
    if (out.dtype() == mx::bfloat16) {
      workers->kernels.to_bfloat16(
          result, out.data<uint16_t>() + offset, count * shape.query_floats());
    } else {
      std::memcpy(out.data<float>() + offset, result,
                  count * shape.query_floats() * sizeof(float));
    }
  }
};

// Of the splits of one row's keys that it sees, [first, first + count), for some of the KV heads.
struct SplitRun {
  size_t row;
  size_t first;
  size_t count;
  cpu::HeadRun kv_heads;
};

// The tasks of a decode_attention() call, and the places of each row's partial results.
struct DecodeCut {
  std::vector<SplitRun> tasks;
  std::vector<size_t> first_partial;  // [rows + 1]
  size_t bytes = 0;                   // bytes of K and V that the call reads

  DecodeCut(const Attention& call, size_t rows) {
    const auto* row = call.rows->rows().data() + call.first_row;
    size_t splits = 0;
    for (size_t r = 0; r < rows; ++r) {
      first_partial.push_back(splits);
      const size_t first = call.softmax.first_seen(row[r].position);
      splits += cpu::splits_of(row[r].position + 1) - first / cpu::kSplitTokens;
      bytes += (row[r].position + 1 - first) * 2 * call.shape.row_bytes();
    }
    first_partial.push_back(splits);
    const size_t fair = splits / (kTasksPerThread * call.workers->pool.threads());
    const size_t run = std::clamp<size_t>(fair, 1, kMaxSplitsPerTask);
    // If there are few splits, tasks divide the KV heads as well.
    const size_t wanted = kFewTasksPerThread * call.workers->pool.threads();
    const size_t parts = std::clamp<size_t>(wanted / splits, 1, call.shape.kv_heads);
    for (size_t r = 0; r < rows; ++r) {
      const size_t count = first_partial[r + 1] - first_partial[r];
      for (size_t s = 0; s < count; s += run) {
        for (size_t part = 0; part < parts; ++part) {
          const size_t first = part * call.shape.kv_heads / parts;
          const size_t end = (part + 1) * call.shape.kv_heads / parts;
          tasks.push_back({r, s, std::min(run, count - s), {first, end - first}});
        }
      }
    }
  }
};

void decode(const Attention& call, const mx::array& queries, mx::array& out) {
  const auto rows = static_cast<size_t>(queries.shape(0));
  const cpu::HeadShape& shape = call.shape;
  const cpu::Kernels& kernels = call.workers->kernels;
  ThreadPool& pool = call.workers->pool;
  const DecodeCut cut(call, rows);
  const size_t partial = cpu::Partial::floats(shape.query_heads, shape.head_dim);

  const auto held = pool.hold();
  float* const prepared = pool.scratch(
      (2 * rows + pool.threads()) * shape.query_floats() + cut.first_partial[rows] * partial);
  float* const results = prepared + rows * shape.query_floats();
  float* const copies = results + rows * shape.query_floats();
  float* const partials = copies + pool.threads() * shape.query_floats();

  for (size_t r = 0; r < rows; ++r) {
    call.prepare(queries, r, copies, prepared + r * shape.query_floats());
  }
  const auto attend = [&](size_t index, size_t) {
    const SplitRun& task = cut.tasks[index];
    const RowTable::Row& row = call.rows->rows()[call.first_row + task.row];
    const size_t tokens = row.position + 1;
    const size_t first = call.softmax.first_seen(row.position);
    for (size_t s = task.first; s < task.first + task.count; ++s) {
      const size_t from = (first / cpu::kSplitTokens + s) * cpu::kSplitTokens;
      const size_t to = std::min(tokens, from + cpu::kSplitTokens);
      const size_t offset = from * shape.row_bytes();
      float* const place = partials + (cut.first_partial[task.row] + s) * partial;
      kernels.attend_split(
          shape, call.softmax.softcap, task.kv_heads, prepared + task.row * shape.query_floats(),
          static_cast<const std::byte*>(call.keys(row)) + offset,
          static_cast<const std::byte*>(call.values(row)) + offset,
          first > from ? first - from : 0, to - from,
          cpu::Partial::at(place, shape.query_heads));
    }
  };
  const auto finish = [&](size_t r, size_t) {
    const size_t first = cut.first_partial[r];
    float* const result = results + r * shape.query_floats();
    kernels.finish(shape, call.softmax.sinks, partials + first * partial,
                   cut.first_partial[r + 1] - first, result);
    call.store(result, out, r, 1);
  };
  const bool shared = cut.bytes >= kParallelKVBytes;
  pool.run(cut.tasks.size(), attend, shared);
  pool.run(rows, finish, shared);
}

void chunk(const Attention& call, const mx::array& queries, mx::array& out) {
  const auto rows = static_cast<size_t>(queries.shape(0));
  const cpu::HeadShape& shape = call.shape;
  const RowTable::Row& first = call.rows->rows()[call.first_row];
  ThreadPool& pool = call.workers->pool;
  const size_t parts = (rows + cpu::kChunkRows - 1) / cpu::kChunkRows;
  const size_t work = cpu::chunk_scratch_floats(shape);

  const auto held = pool.hold();
  float* const prepared = pool.scratch(
      2 * rows * shape.query_floats() + pool.threads() * (work + shape.query_floats()));
  float* const results = prepared + rows * shape.query_floats();
  float* const scratch = results + rows * shape.query_floats();
  float* const copies = scratch + pool.threads() * work;

  pool.run(rows, [&](size_t r, size_t worker) {
    call.prepare(queries, r, copies + worker * shape.query_floats(),
                 prepared + r * shape.query_floats());
  });
  pool.run(parts * shape.kv_heads, [&](size_t index, size_t worker) {
    // The last rows attend to the most keys, and run first, so that no thread ends much later.
    const size_t row = (parts - 1 - index / shape.kv_heads) * cpu::kChunkRows;
    const size_t kv_head = index % shape.kv_heads;
    const size_t offset =
        row * shape.query_floats() + kv_head * shape.group() * shape.head_dim;
    call.workers->kernels.attend_chunk(
        shape, call.softmax, kv_head, prepared + offset, call.keys(first), call.values(first),
        std::min(cpu::kChunkRows, rows - row), first.position + row, results + offset,
        scratch + worker * work);
  });
  call.store(results, out, 0, rows);
}

template <void (*body)(const Attention&, const mx::array&, mx::array&)>
struct Attend {
  static constexpr Results kResults = Results::rows;
  Attention call;

  // `in` has the ordering handle, the queries, and the sinks if there are any.
  void run(const Arrays& in, Arrays& out) const {
    Attention with_sinks = call;
    with_sinks.softmax.sinks = in.size() > 2 ? in.floats(2) : nullptr;
    body(with_sinks, in[1], out[0]);
  }
};

template <void (*body)(const Attention&, const mx::array&, mx::array&)>
mx::array attend(
    const char* name, const mx::array& token, const mx::array& queries, const Rows& rows,
    size_t first_row, const Layer& layer, int64_t kv_heads, const Softmax& softmax,
    const Workers& workers) {
  const cpu::HeadShape shape =
      check_layer(rows->geometry(), layer, queries.shape(1), kv_heads, queries.shape(2));
  softmax.check_heads(queries.shape(1));
  rows->require_mapped(softmax.window);
  std::vector<mx::array> in{token, queries};
  if (softmax.sinks) {
    in.push_back(row_by_row(*softmax.sinks));
  }
  Attention call{rows, first_row, layer, shape, softmax.scale, {softmax.window, softmax.softcap},
                 workers};
  return mx::array(queries.shape(), queries.dtype(),
                   operation(name, Attend<body>{std::move(call)}), std::move(in));
}

}  // namespace

Softmax::Softmax(
    double its_scale, std::optional<int64_t> its_window, double its_softcap,
    std::optional<mx::array> its_sinks)
    : scale(static_cast<float>(its_scale)),
      window(its_window ? checked_between("window", *its_window, 1, INT32_MAX) : SIZE_MAX),
      softcap(static_cast<float>(its_softcap)),
      sinks(std::move(its_sinks)) {
  if (!(softcap >= 0.0f && std::isfinite(softcap))) {
    throw std::invalid_argument("softcap must be a positive number, or 0 for none");
  }
  if (sinks && (sinks->ndim() != 1 || sinks->dtype() != mx::float32)) {
    throw std::invalid_argument("sinks must be float32 [query_heads]");
  }
}

void Softmax::check_heads(int64_t query_heads) const {
  if (sinks && sinks->shape(0) != query_heads) {
    throw std::invalid_argument(
        "there are " + std::to_string(sinks->shape(0)) + " sinks for " +
        std::to_string(query_heads) + " query heads");
  }
}

mx::array decode_attention(
    const mx::array& token, const mx::array& queries, const Rows& rows, int64_t first_row,
    const Layer& layer, int64_t kv_heads, const Softmax& softmax, const Workers& workers) {
  check_rows_array("queries", queries);
  checked_run("rows of the table", first_row, queries.shape(0), rows->rows().size());
  return attend<decode>("decode_attention", token, queries, rows, static_cast<size_t>(first_row),
                        layer, kv_heads, softmax, workers);
}

mx::array chunk_attention(
    const mx::array& token, const mx::array& queries, const Rows& rows, int64_t segment,
    const Layer& layer, int64_t kv_heads, const Softmax& softmax, const Workers& workers) {
  check_rows_array("queries", queries);
  const std::vector<Segment>& segments = rows->segments();
  checked_run("segments of the table", segment, 1, segments.size());
  size_t first_row = 0;
  for (int64_t s = 0; s < segment; ++s) {
    first_row += static_cast<size_t>(segments[static_cast<size_t>(s)].count);
  }
  const int64_t count = segments[static_cast<size_t>(segment)].count;
  if (queries.shape(0) != count) {
    throw std::invalid_argument(
        "queries has " + std::to_string(queries.shape(0)) + " rows; segment " +
        std::to_string(segment) + " has " + std::to_string(count));
  }
  return attend<chunk>("chunk_attention", token, queries, rows, first_row, layer, kv_heads,
                       softmax, workers);
}

}  // namespace quire::ops
