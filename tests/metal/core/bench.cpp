#include "bench.h"

#include <exception>

#include "check.h"
#include "metal/arguments.h"

namespace quire::metal {
namespace {

// What the core's two kernels touch, by their arguments.
std::vector<fake::Access> zeroed(void* const* buffers) {
  const auto& arguments = *static_cast<const BlockArguments*>(buffers[0]);
  std::vector<fake::Access> accesses;
  for (uint32_t region = 0; region < arguments.regions; ++region) {
    accesses.push_back(
        {arguments.target + region * arguments.target_stride, arguments.bytes, true});
  }
  return accesses;
}

std::vector<fake::Access> copied(void* const* buffers) {
  const auto& arguments = *static_cast<const BlockArguments*>(buffers[0]);
  std::vector<fake::Access> accesses = zeroed(buffers);
  for (uint32_t region = 0; region < arguments.regions; ++region) {
    accesses.push_back(
        {arguments.source + region * arguments.source_stride, arguments.bytes, false});
  }
  return accesses;
}

fake::Options machine_for(fake::Options machine, const KVBackend::Options& shape) {
  machine.maps_beside_commands = shape.maps_beside_steps;
  return machine;
}

}  // namespace

Geometry small_geometry(Kind kind, std::vector<int64_t> row_bytes) {
  constexpr int64_t kPage = 16384;
  return kind == Kind::dense ? Geometry(kPage, 96, 1, 1, row_bytes)
                             : Geometry(kPage, 16, 4, 6, row_bytes);
}

KVBackend::Options Bench::default_shape() {
  return {.kind = Kind::sparse,
          .geometry = small_geometry(Kind::sparse),
          .max_ranges = 0,  // the kind's own
          .maps_beside_steps = true,
          .timeout = std::chrono::seconds(20)};
}

KVBackend::Options Bench::quiet_shape() {
  auto shape = default_shape();
  shape.maps_beside_steps = false;
  return shape;
}

Bench::Bench(Kind kind, fake::Options options, KVBackend::Options shape)
    : machine(machine_for(std::move(options), shape)), device(fake::new_device()) {
  if (shape.max_ranges == 0) {
    shape.kind = kind;
    shape.geometry = small_geometry(kind);
    shape.max_ranges = 8;
  }
  shape.residency.now = [this] { return machine.time(); };
  machine.describe_kernel("zero_blocks", &zeroed);
  machine.describe_kernel("copy_blocks", &copied);
  kv_backend = KVBackend::make(device, shape);
  queue = NS::TransferPtr(device->newCommandQueue());
}

Bench::~Bench() noexcept(false) {
  machine.while_waiting(nullptr);
  if (given_up_ || std::uncaught_exceptions() > 0) {
    return;
  }
  end();
}

Bench::Step Bench::step(const std::vector<Segment>& segments) {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  const uint64_t epoch = kv_backend->epochs().start();
  try {
    for (const Segment& segment : segments) {
      kv_backend->own(*segment.range).use(epoch, segment.start, segment.stamps.size());
    }
  } catch (const std::exception&) {
    kv_backend->epochs().abandon(epoch);
    throw;
  }
  kv_backend->residency().attach(queue.get());
  std::vector<MTL::Resource*> used = kv_backend->residency().unattached();
  if (kv_backend->kind() == Kind::dense) {
    used.push_back(kv_backend->own(*segments.at(0).range).view(0).buffer);
  }
  auto commands = NS::RetainPtr(queue->commandBufferWithUnretainedReferences());
  for (const Segment& segment : segments) {
    const size_t end = segment.start + segment.stamps.size();
    const RowPlaces places(*kv_backend, *segment.range, end);
    fake::encode(
        commands.get(), "a step", accesses_of(*kv_backend, segment),
        [mistakes = mistakes_, places, segment, geometry = kv_backend->geometry()] {
          run_segment(places, geometry, segment, *mistakes);
        },
        used);
  }
  commands->encodeSignalEvent(kv_backend->epochs().event(), epoch);
  commands->commit();
  return {epoch, commands};
}

std::vector<std::string> Bench::take_mistakes() {
  std::vector<std::string> all = machine.take_errors();
  const std::lock_guard lock(machine.mutex);
  all.insert(all.end(), mistakes_->begin(), mistakes_->end());
  mistakes_->clear();
  return all;
}

void Bench::require_no_mistakes() {
  const std::vector<std::string> mistakes = take_mistakes();
  CHECK_CASE(mistakes.empty(), mistakes.empty() ? "" : mistakes.front());
}

void Bench::end() {
  given_up_ = true;  // what follows may fail the test
  CHECK_CASE(kv_backend->shutdown(), kv_backend->failure());
  kv_backend.reset();
  queue.reset();
  device.reset();
  machine.run();
  require_no_mistakes();
  for (const auto& [name, count] : machine.alive()) {
    CHECK_CASE(count == 0, std::to_string(count) + " " + name + " are left");
  }
}

}  // namespace quire::metal
