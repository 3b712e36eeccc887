#include "core/metal/kernel_text.h"

#include <algorithm>
#include <stdexcept>

#include "core/checked.h"
#include "metal/arguments.h"

// Names the instances of kernel templates, and joins their source texts.
namespace quire::metal {
namespace {

constexpr size_t kSimdgroup = 32;
constexpr int kHeadDims[] = {64, 128, 256};
constexpr int kDeltaDim = 128;

std::string text_of(Number number) {
  constexpr const char* kNames[] = {"float", "half", "bfloat"};
  return kNames[static_cast<size_t>(number)];
}

std::string text_of(Kind kind) { return name_of(kind); }

std::string text_of(Packing packing) {
  constexpr const char* kNames[] = {"plain", "affine4", "affine8", "mxfp4"};
  return kNames[static_cast<size_t>(packing)];
}

std::string text_of(int head_dim) {
  require<std::logic_error>(
      std::ranges::find(kHeadDims, head_dim) != std::end(kHeadDims),
      "no kernel has a head_dim of ", head_dim, ": they have 64, 128 or 256");
  return std::to_string(head_dim);
}

std::string text_of(uint32_t count) { return std::to_string(count); }

// Returns a kernel template's instance for these arguments, with a name like append_half_paged.
template <class... Arguments>
Kernel instance(
    const char* file, const std::string& function, size_t threads, Arguments... arguments) {
  Kernel kernel{function, file, threads, ""};
  const auto add = [&](const auto& argument) {
    const std::string text = text_of(argument);
    using Argument = std::decay_t<decltype(argument)>;
    const char* const scope = std::is_same_v<Argument, Kind>      ? "Rows::"
                              : std::is_same_v<Argument, Packing> ? "Packing::"
                                                                  : "";
    kernel.name += "_" + text;
    kernel.expression += kernel.expression.empty() ? function + "<" : ", ";
    kernel.expression += scope + text;
  };
  (add(arguments), ...);
  kernel.expression += kernel.expression.empty() ? "" : ">";
  return kernel;
}

// Appends a file's text, with its quoted includes expanded. Skips the files in `seen`.
void append_file(const std::string& file, std::vector<std::string>& seen, std::string& text) {
  if (std::ranges::find(seen, file) != seen.end()) {
    return;
  }
  seen.push_back(file);
  std::string_view rest = embedded_text(file);
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    rest = end == rest.npos ? std::string_view() : rest.substr(end + 1);
    constexpr std::string_view kInclude = "#include \"";
    if (line.starts_with(kInclude)) {
      const size_t quote = line.find('"', kInclude.size());
      append_file(std::string(line.substr(kInclude.size(), quote - kInclude.size())), seen, text);
    } else if (!line.starts_with("#pragma once")) {
      text.append(line).append("\n");
    }
  }
}

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"sparse", "paged", "dense"};
  return kNames[static_cast<size_t>(kind)];
}

Kernel append_kernel(Number activations, Number kv, Kind kind) {
  return instance("append.metal", "append", kCopyThreads, activations, kv, kind);
}

Kernel decode_split_kernel(
    Number activations, Number kv, int head_dim, uint32_t group, Kind kind) {
  return instance(
      "decode.metal", "decode_split", kDecodeThreads, activations, kv, head_dim,
      tile_heads(group), kind);
}

Kernel decode_combine_kernel(Number activations, int head_dim) {
  return instance("combine.metal", "decode_combine", kSimdgroup, activations, head_dim);
}

Kernel project_append_kernel(Number activations, Number kv, int head_dim, Kind kind) {
  return instance("project.metal", "project_append", kSimdgroup, activations, kv, head_dim, kind);
}

Kernel gather_kernel(Number kv, Kind kind) {
  return instance("gather.metal", "gather", kCopyThreads, kv, kind);
}

Kernel products_kernel(Number activations, Packing packing, uint32_t rows) {
  return instance("products.metal", "products", kProductThreads, activations, packing, rows);
}

Kernel gated_product_kernel(Number activations, Packing packing, uint32_t rows) {
  return instance("products.metal", "gated_product", kProductThreads, activations, packing, rows);
}

Kernel expert_gates_kernel(Number activations, Packing packing, uint32_t rows) {
  return instance("experts.metal", "expert_gates", kProductThreads, activations, packing, rows);
}

Kernel expert_downs_kernel(Number activations, Packing packing, uint32_t rows) {
  return instance("experts.metal", "expert_downs", kProductThreads, activations, packing, rows);
}

Kernel route_kernel(Number activations) {
  return instance("route.metal", "route", kRouteThreads, activations);
}

Kernel mix_kernel(Number activations) {
  return instance("experts.metal", "mix", kCopyThreads, activations);
}

Kernel delta_prepare_kernel(Number activations, Kind kind) {
  return instance("delta.metal", "delta_prepare", kCopyThreads, activations, kDeltaDim, kind);
}

Kernel delta_scan_kernel(Number activations, Kind kind) {
  return instance("delta.metal", "delta_scan", kScanThreads, activations, kDeltaDim, kind);
}

Kernel delta_finish_kernel(Number activations, Kind kind) {
  return instance("delta.metal", "delta_finish", kCopyThreads, activations, kDeltaDim, kind);
}

Kernel zero_blocks_kernel() { return instance("blocks.metal", "zero_blocks", kCopyThreads); }

Kernel copy_blocks_kernel() { return instance("blocks.metal", "copy_blocks", kCopyThreads); }

Kernel mark_step_kernel() { return instance("step.metal", "mark_step", 1); }

std::string library_text(const std::vector<Kernel>& kernels) {
  std::vector<std::string> seen;
  std::string text;
  append_file(kernels.at(0).file, seen, text);
  for (const Kernel& kernel : kernels) {
    require<std::logic_error>(
        kernel.file == kernels[0].file, kernel.name, " is not of ", kernels[0].file);
    if (!kernel.expression.empty()) {
      text += "template [[host_name(\"" + kernel.name + "\")]] [[kernel]] decltype(" +
              kernel.expression + ") " + kernel.expression + ";\n";
    }
  }
  return text;
}

}  // namespace quire::metal
