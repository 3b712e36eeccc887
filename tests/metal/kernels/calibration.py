"""MLX's own attention kernel as C++: ``python -m tests.metal.kernels.calibration causal|full``."""

import sys
from importlib.resources import files

from tests.metal.msl.translate import translate

HEADER = "include/mlx/backend/metal/kernels/sdpa_vector.h"
BEFORE = """#include <metal_stdlib>
using namespace metal;
template <typename U>
struct Limits {
  static constexpr U finite_min = metal::numeric_limits<U>::lowest();
};
template <>
struct Limits<bfloat> {
  static constexpr float finite_min = -3.3895313892515355e38f;
};
"""
INSTANCES = ("float", 64), ("bfloat", 128)
CONSTANTS = ("has_mask", "query_transposed", "bool_mask", "float_mask", "has_sinks")


def main() -> None:
    values = dict.fromkeys(CONSTANTS, "false")
    values["do_causal"] = "true" if sys.argv[1] == "causal" else "false"
    values["blocks"] = "1"
    text = BEFORE + files("mlx").joinpath(HEADER).read_text()
    for number, dim in INSTANCES:
        kernel = f"sdpa_vector<{number}, {dim}, {dim}>"
        name = f"sdpa_vector_{number}_{dim}"
        text += f'template [[host_name("{name}")]] [[kernel]] decltype({kernel}) {kernel};\n'
    sys.stdout.write(translate(text, values, "sdpa_vector.h"))


if __name__ == "__main__":
    main()
