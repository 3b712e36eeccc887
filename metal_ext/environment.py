"""What MLX reads from the environment when its first array is made: set here and nowhere else, when
this package is imported. What the user has set wins."""

import ctypes
import os
import re
import sys
from collections.abc import Callable, MutableMapping

# A Metal queue takes 32 residency sets, and 24 may be ours. MLX has one while its wired limit is 0,
# which is never raised here: whoever raises it has MLX spread its memory over sets of 5 % of the
# working set each. Sets of 20 % leave room.
RESIDENCY_VARIABLE = "MLX_RESIDENCY_SET_MAX_PCT"
RESIDENCY_PERCENT = "20"

# MLX gives a command buffer away when it has more than 40 or 50 commands, or when these use more
# than 40 or 50 times 2^20 numbers, weights among them: of a model of 4 billion weights after every
# third layer. Each one costs the GPU about 20 us (mlx#4521). An M5 has become slower with fewer
# (mlxcel#360), so only what came before it has them.
#
# 200 commands, 13 layers: the rest would save a hundredth of a step, and the first ones would start
# later. 100 times 2^20 numbers: what was computed on the way is kept until its command buffer has
# completed, and ten of them may be on their way. Of a long prompt that is 2 GiB at most, which the
# plan leaves beside K and V for activations, MLX's cache and the system; 400 would make it 8.
LARGER_BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "100"}
TAKE_LARGER_BUFFERS = re.compile(r"Apple M[1-4]\b")

PROCESSOR = b"machdep.cpu.brand_string"
MOST_BYTES = 256


def prepare(
    environment: MutableMapping[str, str] = os.environ,
    platform: str = sys.platform,
    processor: Callable[[], str] | None = None,
) -> None:
    """Sets what is not set. processor: tells its name, such as "Apple M1 Max"."""
    if platform != "darwin":
        return
    environment.setdefault(RESIDENCY_VARIABLE, RESIDENCY_PERCENT)
    if TAKE_LARGER_BUFFERS.match((processor or processor_name)()):
        for variable, most in LARGER_BUFFERS.items():
            environment.setdefault(variable, most)


def processor_name() -> str:
    """The name that macOS has for this machine's; empty where the system tells none."""
    call = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if call is None:
        return ""
    name, size = ctypes.create_string_buffer(MOST_BYTES), ctypes.c_size_t(MOST_BYTES)
    failed = call(PROCESSOR, name, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else name.value.decode(errors="replace")
