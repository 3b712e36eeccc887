#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

// MLX's side of an evaluation: what happens to its encoder between the operations that fill it.
namespace quire::graph {

// The stream whose encoder is modelled: the engine's. There is one engine at a time.
const mlx::core::Stream& model_stream();
bool encoder_is_open();

void end_encoder();
// Gives the command buffer away; the encoder must have ended.
void next_command_buffer();

// A command of MLX's own, which reads these arrays and writes the result: in truth MLX computes it
// on its CPU stream.
void encode_foreign(
    const mlx::core::Stream& stream, const std::vector<mlx::core::array>& reads,
    mlx::core::array& result);

}  // namespace quire::graph
