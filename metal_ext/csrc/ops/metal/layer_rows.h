#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/checked.h"
#include "core/metal/kernel_text.h"
#include "metal/arguments.h"
#include "ops/metal/rows.h"
#include "ops/ops.h"

// The place of a layer's K and V, in the form that kernels of a GPU read.
namespace quire::ops {

// Returns the kernels' name of a type. Throws std::invalid_argument for types without kernels.
metal::Number number_of(const char* name, mx::Dtype type);
// Returns the kernels' number of an MLP's gate. Throws std::invalid_argument for unknown gates.
uint32_t number_of_gate(const std::string& kind);

// The heads of a row. In a row without queries, query_heads equals kv_heads.
struct Heads {
  int64_t query_heads;
  int64_t kv_heads;
  int64_t head_dim;

  uint32_t row_elements() const {
    return narrowed<uint32_t>("numbers of a row", kv_heads * head_dim);
  }
};

// The place of a layer's K and V in a backend's memory.
struct LayerRows {
  // Throws an error with the cause unless both regions lie in one buffer and fit these heads.
  LayerRows(const metal::KVBackend& memory, const Layer& layer, const Heads& heads);

  metal::LayerPlace place;
  size_t buffer;  // index among the sequence's buffers
  metal::Number kv;
  metal::Kind kind;
};

enum class RowAccess { read, write };

// Binds three arrays from index `first_index` on: the table of rows, the page table, and the buffer
// that all dense sequences share. Declares that the commands read or write rows.
void bind_rows(
    Encoder& encoder, const MetalRows& rows, const LayerRows& layer, int first_index,
    RowAccess access);

// Runs a kernel that copies rows, a few numbers in each thread.
void run_over_rows(Encoder& encoder, size_t row_elements, size_t rows);

// Throws std::invalid_argument unless x is [rows, heads, head_dim] of a type with kernels.
void check_device_rows(const char* name, const mx::array& x);
void check_same_type(
    const char* x_name, const mx::array& x, const char* y_name, const mx::array& y);

}  // namespace quire::ops
