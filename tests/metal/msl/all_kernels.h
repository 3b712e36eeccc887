// Every kernel that the host can name (core/metal/kernel_text.h).
#pragma once

#include <vector>

#include "core/metal/kernel_text.h"

namespace quire::metal {

inline std::vector<Kernel> all_kernels() {
  constexpr Number kNumbers[] = {Number::float32, Number::float16, Number::bfloat16};
  constexpr int kHeadDims[] = {64, 128, 256};
  constexpr Kind kKinds[] = {Kind::sparse, Kind::dense, Kind::paged};
  constexpr Packing kPackings[] = {
      Packing::plain, Packing::affine4, Packing::affine8, Packing::mxfp4};
  std::vector<Kernel> all{zero_blocks_kernel(), copy_blocks_kernel(), mark_step_kernel()};
  for (Number activations : kNumbers) {
    all.push_back(route_kernel(activations));
    all.push_back(mix_kernel(activations));
    for (Packing packing : kPackings) {
      for (uint32_t rows : {1u, 2u, 4u}) {
        all.push_back(products_kernel(activations, packing, rows));
        all.push_back(gated_product_kernel(activations, packing, rows));
        if (rows != 2) {
          all.push_back(expert_gates_kernel(activations, packing, rows));
          all.push_back(expert_downs_kernel(activations, packing, rows));
        }
      }
    }
    for (Kind kind : {Kind::sparse, Kind::dense}) {
      all.push_back(delta_prepare_kernel(activations, kind));
      all.push_back(delta_scan_kernel(activations, kind));
      all.push_back(delta_finish_kernel(activations, kind));
    }
    for (int head_dim : kHeadDims) {
      all.push_back(decode_combine_kernel(activations, head_dim));
    }
  }
  for (Number kv : kNumbers) {
    for (Kind kind : kKinds) {
      all.push_back(gather_kernel(kv, kind));
      for (Number activations : kNumbers) {
        all.push_back(append_kernel(activations, kv, kind));
        for (int head_dim : kHeadDims) {
          for (uint32_t group : {4u, 6u, 8u}) {
            all.push_back(decode_split_kernel(activations, kv, head_dim, group, kind));
          }
          all.push_back(project_append_kernel(activations, kv, head_dim, kind));
        }
      }
    }
  }
  return all;
}

}  // namespace quire::metal
