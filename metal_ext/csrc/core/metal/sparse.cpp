#include "core/metal/sparse.h"

#include <algorithm>
#include <stdexcept>

#include "core/checked.h"
#include "core/metal/context.h"

// Implements sparse GPU memory: placement heaps, sparse buffers, and batches of mappings.
namespace quire::metal {

BufferPlan::BufferPlan(const Geometry& geometry, size_t max_buffer_bytes) {
  const size_t blocks = geometry.slots_per_range();
  for (size_t layer = 0; layer < geometry.regions(); layer += 2) {
    const size_t end = std::min(layer + 2, geometry.regions());
    size_t layer_bytes = 0;
    for (size_t region = layer; region < end; ++region) {
      layer_bytes += geometry.region_block_bytes(region) * blocks;
    }
    require<std::runtime_error>(
        layer_bytes <= max_buffer_bytes, "a layer's keys and values of one sequence take ",
        layer_bytes, " bytes, but a buffer has ", max_buffer_bytes,
        " at most; a smaller maximum context is needed");
    if (bytes.empty() || bytes.back() + layer_bytes > max_buffer_bytes) {
      bytes.push_back(0);
    }
    for (size_t region = layer; region < end; ++region) {
      const uint64_t stride = geometry.region_block_bytes(region) * blocks;
      if (bytes.back() == 0 || runs.back().stride != stride) {
        runs.push_back({region, 0, stride});
      }
      ++runs.back().regions;
      places.push_back({bytes.size() - 1, bytes.back()});
      bytes.back() += stride;
    }
  }
}

void PlacementHeap::make() {
  const auto pool = new_pool();
  const auto descriptor = NS::TransferPtr(MTL::HeapDescriptor::alloc()->init());
  descriptor->setType(MTL::HeapTypePlacement);
  descriptor->setStorageMode(MTL::StorageModePrivate);
  descriptor->setHazardTrackingMode(MTL::HazardTrackingModeUntracked);
  descriptor->setSize(geometry().heap_bytes());
  descriptor->setMaxCompatiblePlacementSparsePageSize(
      sparse_page_size(geometry().page_bytes()));
  heap_ = NS::TransferPtr(context()->device->newHeap(descriptor.get()));
  if (!heap_) {
    refuse_memory(message("a GPU heap of ", geometry().heap_bytes(), " bytes"));
  }
  context()->residency.add(heap_.get(), geometry().heap_bytes());
}

void PlacementHeap::unmake() {
  context()->residency.remove(heap_.get());
  heap_.reset();
}

SparseBufferRange::SparseBufferRange(
    std::shared_ptr<Context> context, std::shared_ptr<const BufferPlan> plan)
    : DeviceRange(std::move(context)), plan_(std::move(plan)) {
  const auto pool = new_pool();
  for (const size_t bytes : plan_->bytes) {
    // Metal does not track uses of the buffer, because kernels use its address.
    auto buffer = NS::TransferPtr(this->context()->device->newBuffer(
        bytes, MTL::ResourceStorageModePrivate | MTL::ResourceHazardTrackingModeUntracked,
        sparse_page_size(geometry().page_bytes())));
    if (!buffer) {
      refuse_memory(message("a sparse buffer of ", bytes, " bytes"));
    }
    addresses_.push_back(buffer->gpuAddress());
    buffers_.push_back(std::move(buffer));
  }
  for (const auto& buffer : buffers_) {
    // The size is 0 because the memory mapped in the buffer is counted with the heaps.
    this->context()->residency.add(buffer.get(), 0);
  }
}

std::byte* SparseBufferRange::region(size_t index) const {
  const RegionPlace& at = plan_->places.at(index);
  return reinterpret_cast<std::byte*>(addresses_[at.buffer] + at.offset);
}

BufferPlace SparseBufferRange::view(size_t region) const {
  const RegionPlace& at = plan_->places.at(region);
  return {buffers_.at(at.buffer).get(), at.offset};
}

void SparseBufferRange::drop() {
  for (const auto& buffer : buffers_) {
    context()->residency.remove(buffer.get());
  }
  buffers_.clear();
}

std::vector<std::vector<MappingOperation>> SparseBufferRange::operations(
    MTL::SparseTextureMappingMode mode, size_t heap_block, size_t block, size_t count) const {
  const Geometry& shape = geometry();
  const size_t page = shape.page_bytes();
  const std::vector<SlotRun> runs = slot_runs(block, count);
  std::vector<std::vector<MappingOperation>> operations(buffers_.size());
  for (size_t region = 0; region < shape.regions(); ++region) {
    const RegionPlace& at = plan_->places[region];
    const size_t bytes = shape.region_block_bytes(region);
    for (const SlotRun& run : runs) {
      const size_t from = shape.heap_region_offset(region) + (heap_block + run.skipped) * bytes;
      operations[at.buffer].push_back({
          .mode = mode,
          .bufferRange = NS::Range((at.offset + run.slot * bytes) / page, run.count * bytes / page),
          .heapOffset = mode == MTL::SparseTextureMappingModeMap ? from / page : 0,
      });
    }
  }
  return operations;
}

void SparseBufferRange::begin_map(const Run& run) {
  MTL::Heap* const heap = static_cast<PlacementHeap&>(*run.heap).heap();
  const auto maps =
      operations(MTL::SparseTextureMappingModeMap, run.heap_block, run.block, run.count);
  for (size_t b = 0; b < buffers_.size(); ++b) {
    context()->mapping->map(buffers_[b].get(), heap, maps[b]);
  }
}

uint64_t SparseBufferRange::address(size_t region_index, size_t block) const {
  return reinterpret_cast<uint64_t>(region(region_index)) +
         slot(block) * geometry().region_block_bytes(region_index);
}

void SparseBufferRange::add_zeros(const Run& run, std::vector<BlockArguments>& zeros) const {
  for (const BufferPlan::Run& alike : plan_->runs) {
    const size_t region = alike.first_region;
    zeros.push_back({0, address(region, run.block), 0, alike.stride,
                     run.count * geometry().region_block_bytes(region),
                     narrowed<uint32_t>("regions", alike.regions), 0});
  }
}

bool SparseBufferRange::attach(const Run& run) {
  Bundle& bundle = *context()->bundle;
  bundle.add(*this, run);
  if (context()->maps_beside_steps) {
    bundle.finish();
  }
  return false;
}

void SparseBufferRange::prepare_unmap() {
  DeviceRange::prepare_unmap();
  if (Bundle& bundle = *context()->bundle; bundle.has(*this)) {
    bundle.finish();
  }
}

void SparseBufferRange::detach(size_t block, size_t count) {
  const auto unmaps = operations(MTL::SparseTextureMappingModeUnmap, 0, block, count);
  const auto turn = context()->turns.change();
  for (size_t b = 0; b < buffers_.size(); ++b) {
    context()->mapping->unmap(buffers_[b].get(), unmaps[b]);
  }
}

void SparseBufferRange::copy(
    DeviceRange& source, size_t source_block, size_t block, size_t tokens) {
  const auto& from = static_cast<const SparseBufferRange&>(source);
  std::vector<BlockArguments> work;
  for (const BufferPlan::Run& run : plan_->runs) {
    work.push_back({from.address(run.first_region, source_block), address(run.first_region, block),
                    run.stride, run.stride, tokens * geometry().row_bytes(run.first_region),
                    narrowed<uint32_t>("regions", run.regions), 0});
  }
  context()->work->copy(work);
}

uint32_t SparseBufferRange::move_place(
    Direction direction, const Place&, size_t block, const FilePlace& file) {
  std::vector<Staging::Piece> pieces;
  for (size_t region = 0; region < geometry().regions(); ++region) {
    pieces.push_back({address(region, block), geometry().region_block_bytes(region)});
  }
  return context()->staging->move(direction, std::move(pieces), file);
}

void Bundle::add(SparseBufferRange& range, const Run& run) {
  if (!point_) {
    point_ = context_.mapping_point("blocks cannot be mapped");
  }
  maps_.emplace_back(&range, run);
}

bool Bundle::has(const SparseBufferRange& range) const {
  return std::ranges::any_of(maps_, [&](const auto& map) { return map.first == &range; });
}

void Bundle::finish() {
  const auto maps = std::exchange(maps_, {});
  const Epochs::Pause point = std::move(point_);
  if (maps.empty()) {
    return;
  }
  context_.health.require();
  const auto turn = context_.turns.change();
  context_.residency.refresh();
  for (const auto& [range, run] : maps) {
    range->begin_map(run);
  }
  // Rule: commands use a page only if they are encoded after its mapping is complete.
  context_.mapping->finish();
  // Rule: memory is zeroed before a new sequence uses it, because pages keep their old content.
  std::vector<BlockArguments> zeros;
  for (const auto& [range, run] : maps) {
    if (run.writable) {
      range->add_zeros(run, zeros);
    }
  }
  if (!zeros.empty()) {
    context_.work->zero(zeros);
  }
  for (const auto& [range, run] : maps) {
    range->observe(run);
  }
}

void Bundle::withdraw() {
  for (const auto& [range, run] : maps_) {
    range->withdraw(run);
  }
  maps_.clear();
  point_.reset();
}

}  // namespace quire::metal
