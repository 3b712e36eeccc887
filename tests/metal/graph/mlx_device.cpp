// MLX's device as quire's operations ask it: libraries from text, kernels by name, each kept.
#include <Metal/Metal.hpp>

#include <algorithm>
#include <stdexcept>

#include "fake/fake_metal.h"
#include "mlx/backend/metal/device.h"
#include "recorder.h"

namespace mlx::core::metal {

Device::Device() : device_(quire::fake::new_device()), residency_sets_(device_.get()) {}

Device::~Device() = default;

MTL::Library* Device::get_library(
    const std::string& name, const CompileOptions&,
    const std::function<std::string(void)>& builder) {
  if (const auto found = library_map_.find(name); found != library_map_.end()) {
    return found->second.get();
  }
  const std::string text = builder();
  const bool ascii = std::all_of(text.begin(), text.end(), [](char character) {
    return static_cast<unsigned char>(character) < 0x80;
  });
  if (!ascii) {
    quire::graph::Recorder::instance().report(name + " is no ASCII text, which MLX compiles alone");
  }
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  NS::Error* error = nullptr;
  auto* const words = NS::String::string(text.c_str(), NS::ASCIIStringEncoding);
  library_map_[name] = NS::TransferPtr(device_->newLibrary(words, nullptr, &error));
  return library_map_[name].get();
}

MTL::ComputePipelineState* Device::get_kernel(
    const std::string& name, MTL::Library* library, const std::string&, const MTLFCList&,
    const std::vector<MTL::Function*>&) {
  auto& kernels = library_kernels_[library];
  if (const auto found = kernels.find(name); found != kernels.end()) {
    return found->second.get();
  }
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto* const words = NS::String::string(name.c_str(), NS::ASCIIStringEncoding);
  const auto function = NS::TransferPtr(library->newFunction(words));
  if (!function) {
    throw std::runtime_error("no kernel is called " + name);
  }
  NS::Error* error = nullptr;
  kernels[name] = NS::TransferPtr(device_->newComputePipelineState(function.get(), &error));
  return kernels[name].get();
}

}  // namespace mlx::core::metal
