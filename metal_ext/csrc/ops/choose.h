#pragma once

#include <utility>

#include "ops/ops.h"

namespace quire::ops {

// The tokens of R rows over V numbers each: (ids [R] int32, finite [R] bool). raw: [R, V] float32,
// as the model gave them; finite says whether all of a row are numbers, and the id of one that is
// not is 0. adjusted: [R, V] float32, of which the ids are chosen; may be raw itself.
// choices: [R, 5] float32: temperature, top_k, top_p, min_p, draw.
std::pair<mx::array, mx::array> choose_tokens(
    const mx::array& raw, const mx::array& adjusted, const mx::array& choices,
    const Workers& workers);

}  // namespace quire::ops
