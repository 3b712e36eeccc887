// Every kernel as a pipeline of this machine's device, compiled from its text as the host does it.
//
//   pipelines        exit code 1 where a pipeline is missing or too small
//
// A device without reductions across a simdgroup (older than Apple's seventh family, as some virtual
// machines' are) may refuse kernels: they are listed, and are no fault.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Metal/Metal.hpp>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "../msl/all_kernels.h"

namespace {

using quire::metal::Kernel;

constexpr size_t kSimdWidth = 32;

struct Tally {
  int good = 0;
  int refused = 0;
  int wrong = 0;
};

NS::String* string(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

std::string words(const NS::Error* error) {
  return error == nullptr ? "without a word" : error->localizedDescription()->utf8String();
}

NS::SharedPtr<MTL::Device> first_device() {
  const auto devices = NS::TransferPtr(MTL::CopyAllDevices());
  if (!devices || devices->count() == 0) {
    return {};
  }
  return NS::RetainPtr(devices->object<MTL::Device>(0));
}

void refuse(bool excused, const std::string& name, const std::string& why, Tally& tally) {
  std::printf("%s %s: %s\n", excused ? "SKIPPED" : "WRONG", name.c_str(), why.c_str());
  ++(excused ? tally.refused : tally.wrong);
}

void check(MTL::Device* device, MTL::Library* library, const Kernel& kernel, bool excused,
           Tally& tally) {
  const std::string& name = kernel.name;
  const auto function = NS::TransferPtr(library->newFunction(string(name)));
  if (!function) {
    refuse(false, name, "its library does not have it", tally);
    return;
  }
  NS::Error* error = nullptr;
  const auto pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
  if (!pipeline) {
    refuse(excused, name, words(error), tally);
    return;
  }
  const size_t most = pipeline->maxTotalThreadsPerThreadgroup();
  const size_t width = pipeline->threadExecutionWidth();
  if (most < kernel.threads || width != kSimdWidth) {
    refuse(false, name, std::to_string(most) + " threads at most, " +
           std::to_string(kernel.threads) + " are needed; simdgroups of " + std::to_string(width),
           tally);
    return;
  }
  ++tally.good;
}

}  // namespace

int main() {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  const auto device = first_device();
  if (!device) {
    std::puts("SKIPPED everything: there is no Metal device");
    return 0;
  }
  const bool excused = !device->supportsFamily(MTL::GPUFamilyApple7);
  std::printf("%s, %s reductions across a simdgroup\n", device->name()->utf8String(),
              excused ? "without" : "with");

  std::map<std::string, std::vector<Kernel>> files;
  for (const Kernel& kernel : quire::metal::all_kernels()) {
    files[kernel.file].push_back(kernel);
  }
  Tally tally;
  for (const auto& [file, kernels] : files) {
    const std::string text = quire::metal::library_text(kernels);
    NS::Error* error = nullptr;
    const auto library = NS::TransferPtr(device->newLibrary(string(text), nullptr, &error));
    if (!library) {
      refuse(excused, file, words(error), tally);
      continue;
    }
    for (const Kernel& kernel : kernels) {
      check(device.get(), library.get(), kernel, excused, tally);
    }
  }
  std::printf("%d pipelines are as they should be, %d were refused by a device that may, %d are "
              "wrong\n", tally.good, tally.refused, tally.wrong);
  return tally.wrong == 0 ? 0 : 1;
}
