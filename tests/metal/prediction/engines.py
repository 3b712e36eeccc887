"""What mlx-lm and quire dispatch, submit and wait for in a step: counts from their sources.

mlx-lm's per layer, with ``BatchKVCache``, which its server has even for one sequence: four norms,
seven products, two rotations, two writes into the cache, attention, SwiGLU, two sums, and the
cache's offsets. test_prediction.py counts the distinct ones in the graph of the mlx-lm that is
installed. On the longest way through a layer lie norm, keys, their norm, rotation and write,
attention, output, sum, norm, gate, SwiGLU, down and sum.
"""

from dataclasses import dataclass, replace
from enum import Enum

from tests.metal.prediction.assumptions import Chip


class Overlap(Enum):
    """What of the next step the device has when the host reads this one."""

    FIRST_LAYER = "first layer ahead"
    WHOLE_STEP = "whole step ahead"
    READ_BEHIND = "whole step ahead, each token read behind it"


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """A command buffer ends after so many operations, or millions (2**20) of numbers read."""

    operations: int
    numbers: int


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to decode."""

    name: str
    dependent: int
    """Dispatches of a layer that wait for the one before them."""
    independent: int
    """Others of a layer."""
    has_own_attention: bool
    """quire's two dispatches, counted above. MLX's are one, and one more for long sequences."""
    step_dispatches: int
    """Outside of layers; all dependent."""
    overlap: Overlap
    limits: BufferLimits | None = None
    """None: MLX's own."""
    is_mlx_lm: bool = False
    """Its cache grows by copies, and it waits for each chunk of a prompt."""
    masks_with_array: bool = False
    """Prompts: where a causal kernel would leave half of a chunk's own keys out."""

    def buffer_limits(self, chip: Chip) -> BufferLimits:
        """MLX's are mlx/backend/metal/device.cpp's. An M5 gains nothing by larger ones."""
        if self.limits is None or chip.generation == 5:
            return BufferLimits(40, 40) if chip.is_base else BufferLimits(50, 50)
        return self.limits


# --- mlx-lm 0.32.2 ------------------------------------------------------------------------------

SERVER = Engine(
    name="mlx-lm's server",
    dependent=13,
    independent=7,
    has_own_attention=False,
    # Embedding 4, mask 5, final norm, head, and logsumexp, subtraction, argmax.
    step_dispatches=14,
    overlap=Overlap.READ_BEHIND,
    is_mlx_lm=True,
    masks_with_array=True,
)
GENERATOR = replace(SERVER, name="mlx-lm's BatchGenerator alone", overlap=Overlap.WHOLE_STEP)
# One sequence without a server: no mask, no offsets. What peers measure.
GENERATE = replace(
    GENERATOR,
    name="mlx_lm.generate",
    independent=6,
    step_dispatches=9,
    masks_with_array=False,
)

# --- quire --------------------------------------------------------------------------------------

BEFORE = Engine(
    name="quire, 17 a layer",
    # norm, keys, project_append, split, combine, output, sum, norm, gate, 3 of SwiGLU, down, sum
    dependent=14,
    independent=3,  # queries, values, up
    has_own_attention=True,
    # Embedding 4, final norm and its rows 2, head, and 7 of the sampler and of the step's end.
    step_dispatches=14,
    overlap=Overlap.FIRST_LAYER,
)
LARGER_BUFFERS = BufferLimits(200, 100)
AFTER = replace(
    BEFORE,
    name="quire, 15 a layer",
    dependent=12,  # SwiGLU in one
    overlap=Overlap.WHOLE_STEP,
    limits=LARGER_BUFFERS,
)
# Where splits need not be put together.
AFTER_14 = replace(AFTER, name="quire, 14 a layer", dependent=11)
