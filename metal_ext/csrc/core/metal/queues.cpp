#include "core/metal/queues.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "core/checked.h"
#include "core/metal/kernel_text.h"

// Implements the queue that maps sparse buffers, and commands that fill and copy blocks.
namespace quire::metal {

MTL::SparsePageSize sparse_page_size(size_t bytes) {
  switch (bytes) {
    case size_t{16} << 10:
      return MTL::SparsePageSize16;
    case size_t{64} << 10:
      return MTL::SparsePageSize64;
    case size_t{256} << 10:
      return MTL::SparsePageSize256;
    default:
      throw std::invalid_argument(message(
          "page_bytes is ", bytes, "; pages of sparse buffers have 16384, 65536 or 262144 bytes"));
  }
}

MappingQueue::MappingQueue(MTL::Device* device, Health& health)
    : health_(health),
      queue_(NS::TransferPtr(device->newMTL4CommandQueue())),
      event_(make_shared_event(device)) {
  if (!queue_) {
    refuse_memory("the GPU gives no mapping queue");
  }
}

MappingQueue::Operations MappingQueue::issue(
    MTL::Buffer* buffer, MTL::Heap* heap, Operations operations) {
  health_.require();
  const Operations batch = operations.first(std::min(operations.size(), kMaxOperations));
  const auto pool = new_pool();
  queue_->updateBufferMappings(buffer, heap, batch.data(), batch.size());
  queue_->signalEvent(event_.get(), ++signalled_);
  outstanding_ += batch.size();
  return operations.subspan(batch.size());
}

void MappingQueue::wait() {
  if (!wait_for_value(event_.get(), signalled_, health_.timeout())) {
    health_.time_out(message(
        outstanding_, " mapping operations of sparse buffers, up to batch ", signalled_));
  }
  outstanding_ = 0;
}

void MappingQueue::map(MTL::Buffer* buffer, MTL::Heap* heap, Operations operations) {
  const std::lock_guard lock(mutex_);
  while (!operations.empty()) {
    operations = issue(buffer, heap, operations);
  }
}

void MappingQueue::unmap(MTL::Buffer* buffer, Operations operations) {
  const std::lock_guard lock(mutex_);
  while (!operations.empty()) {
    operations = issue(buffer, nullptr, operations);
    wait();
  }
}

void MappingQueue::finish() {
  const std::lock_guard lock(mutex_);
  if (outstanding_ > 0) {
    wait();
  }
}

namespace {

constexpr size_t kBytesPerThread = 16;
// The time between checks for a failed command, which signals no event that would end a wait.
constexpr std::chrono::milliseconds kLookAgain{50};

std::string words(const NS::Error* error) {
  const NS::String* text = error == nullptr ? nullptr : error->localizedDescription();
  return text == nullptr ? "it does not say why" : text->utf8String();
}

NS::SharedPtr<MTL::ComputePipelineState> make_pipeline(
    MTL::Device* device, MTL::Library* library, const char* name) {
  const auto function = NS::TransferPtr(
      library->newFunction(NS::String::string(name, NS::UTF8StringEncoding)));
  NS::Error* error = nullptr;
  auto pipeline = function
      ? NS::TransferPtr(device->newComputePipelineState(function.get(), &error))
      : NS::SharedPtr<MTL::ComputePipelineState>();
  require<std::runtime_error>(
      static_cast<bool>(pipeline), "the GPU refuses the kernel ", name, ": ", words(error));
  return pipeline;
}

}  // namespace

BlockWork::BlockWork(MTL::Device* device, Health& health, const BlockWork* other)
    : health_(health),
      queue_(NS::TransferPtr(device->newCommandQueue())),
      event_(make_shared_event(device)) {
  if (!queue_) {
    refuse_memory("the GPU gives no command queue");
  }
  if (other != nullptr) {
    zero_ = other->zero_;
    copy_ = other->copy_;
    return;
  }
  const auto pool = new_pool();
  const std::string text = library_text({zero_blocks_kernel(), copy_blocks_kernel()});
  NS::Error* error = nullptr;
  const auto library = NS::TransferPtr(device->newLibrary(
      NS::String::string(text.c_str(), NS::UTF8StringEncoding), nullptr, &error));
  require<std::runtime_error>(
      static_cast<bool>(library), "the GPU refuses blocks.metal: ", words(error));
  zero_ = make_pipeline(device, library.get(), "zero_blocks");
  copy_ = make_pipeline(device, library.get(), "copy_blocks");
}

void BlockWork::run(
    MTL::ComputePipelineState* kernel, const char* name, std::span<const BlockArguments> runs) {
  const std::lock_guard lock(mutex_);
  health_.require();
  const auto pool = new_pool();
  MTL::CommandBuffer* const commands = queue_->commandBuffer();
  MTL::ComputeCommandEncoder* const encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(kernel);
  for (const BlockArguments& arguments : runs) {
    const size_t threads = (arguments.bytes + kBytesPerThread - 1) / kBytesPerThread;
    encoder->setBytes(&arguments, sizeof arguments, 0);
    encoder->dispatchThreadgroups(
        MTL::Size((threads + kCopyThreads - 1) / kCopyThreads, arguments.regions, 1),
        MTL::Size(kCopyThreads, 1, 1));
  }
  encoder->endEncoding();
  commands->encodeSignalEvent(event_.get(), ++signalled_);
  commands->commit();
  wait(commands, name);
}

void BlockWork::wait(MTL::CommandBuffer* commands, const char* name) {
  const auto deadline = std::chrono::steady_clock::now() + health_.timeout();
  while (true) {
    const auto left = deadline - std::chrono::steady_clock::now();
    const auto slice = std::min<std::chrono::nanoseconds>(left, kLookAgain);
    if (wait_for_value(event_.get(), signalled_, slice)) {
      return;
    }
    if (commands->status() == MTL::CommandBufferStatusError) {
      health_.fail(message("the GPU failed in ", name, ": ", words(commands->error())));
    }
    if (left <= left.zero()) {
      health_.time_out(name);
    }
  }
}

}  // namespace quire::metal
