"""The stand-ins for Metal and for MLX's encoder (module.cpp)."""

import mlx.core as mx

def start(seed: int, lacks: set[str] = ...) -> None:
    """Makes the computer, with its GPU. Before anything else, once.

    lacks: what its objects do not answer: "MTLDevice newResidencySetWithDescriptor:error:".
    """

def seed(seed: int) -> None:
    """Of the chance by which MLX ends an encoder, or gives a command buffer away, between two
    operations."""

def observed(result: mx.array, reads: list[mx.array]) -> mx.array:
    """The result of an operation of MLX's own that has read these arrays.

    MLX computes it on its CPU stream; for the model it is one command on the device.
    """

def zeros_of_nothing(shape: list[int], dtype: mx.Dtype) -> mx.array:
    """An evaluated array in row-major order, of zeros, without memory until they are written."""

def hand_over() -> None:
    """MLX gives its command buffer away."""

def settle() -> None:
    """Everything that was evaluated has run, and the host knows it."""

def take_mistakes() -> list[str]:
    """What was found wrong since the last time, in words."""

def counts() -> dict[str, int]:
    """operations, commands, encoders, command_buffers, barriers, waits (for fences)."""

def operations_behind(
    arrays: list[mx.array],
) -> list[tuple[str, list[tuple[int, int]], set[int]]]:
    """What has to be computed for these arrays, inputs first: names; buffers that commands read and
    write, with their numbers as MLX counts them, none where a GPU has no command; which inputs do
    not lie in order."""

def residency() -> dict[str, int]:
    """sets: how many residency sets there are. buffers: how many buffers are in one. requests: how
    often residency was asked for."""

def calls(operation: str) -> list[str]:
    """The calls that the newest evaluation of an operation has made to MLX's encoder."""

def allow_maps_beside_commands(allowed: bool) -> None:
    """Whether mappings may change of what a command in flight may touch; not, at first."""

def stall_mappings() -> None:
    """The device maps nothing from now on, and says nothing of it; commands run."""

def fail_next_commands(words: str) -> None:
    """The next command buffer of quire's own that is committed fails with these words."""

def plant(operation: str, call: str = "", which: set[int] = ..., how: str = "") -> None:
    """From now on, these calls of every evaluation of the operation are not made as they should be.

    which: of the calls of that name, from 0. how: "drop"; "input": an output is bound, but not said
    to be written; "register": it is said to be written, but not to follow what wrote it before; "no
    wait": an encoder ends without waiting for those in flight. operation "*" means all of them, ""
    ends that.
    """
