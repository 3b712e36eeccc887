"""MLX's default device and the device that quire's extension finds, as on a Mac.

MLX computes on the CPU whatever its default device says. quire's operations refuse a default device
that they do not run on, in the words of the extension: who forgets to choose one is found.
"""

import atexit
import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

WRONG_ON_GPU = (
    "{0} has rows on the CPU, but a GPU stream: run the model on the CPU "
    "(mlx.core.set_default_device(mlx.core.cpu))"
)
WRONG_ON_CPU = (
    "{0} has rows on Metal, but a CPU stream: run the model on the GPU "
    "(mlx.core.set_default_device(mlx.core.gpu))"
)
FOLDER = Path(os.environ.get("DARWIN_FIGURES", ""))
# On figures alone, or on no stream of MLX's.
WITHOUT_STREAM = (
    *("instruction_sets", "metal_capabilities"),
    *("packed_bytes", "packed_rows", "uncounted"),
)
# Without rows, and of a GPU alone.
OF_A_GPU = ("mixture", "multiply", "multiply_gated")


class Gpu:
    """Of this process."""

    default: Any = None
    """MLX's default device."""
    take_mistakes: Callable[[], list[str]] | None = None


def choose(core: ModuleType) -> None:
    """mlx.core has a GPU, and it is the default. Streams that are asked for on it are the CPU's."""
    Gpu.default = core.Device(core.gpu)
    on_cpu = core.Device(core.cpu)

    def set_default_device(device: Any) -> None:
        Gpu.default = core.Device(device) if isinstance(device, core.DeviceType) else device

    def of_the_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*_: Any) -> Any:
            return make(on_cpu)

        return made

    core.set_default_device = set_default_device  # type: ignore[attr-defined]
    core.default_device = lambda: Gpu.default  # type: ignore[attr-defined]
    for name in ("new_stream", "default_stream"):
        setattr(core, name, of_the_cpu(getattr(core, name)))
    for name in ("quantized_matmul", "gather_qmm"):
        setattr(core, name, in_float32(getattr(core, name)))
    fast: Any = core.fast
    fast.scaled_dot_product_attention = unfused(fast.scaled_dot_product_attention)


def in_float32(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """The product, summed as on a GPU. MLX's CPU sums in as many bits as the inputs have."""

    @functools.wraps(multiply)
    def multiplied(inputs: Any, codes: Any, scales: Any, *biases: Any, **named: Any) -> Any:
        float32 = importlib.import_module("mlx.core").float32
        exact = [array.astype(float32) for array in (scales, *biases)]
        return multiply(inputs.astype(float32), codes, *exact, **named).astype(inputs.dtype)

    return multiplied


def unfused(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention by MLX, which has one kernel for all of it on a GPU alone."""

    @functools.wraps(attend)
    def attended(*arrays: Any, force_fused: bool = False, **named: Any) -> Any:
        return attend(*arrays, **named)

    return attended


def guard(metal_ext: ModuleType) -> None:
    """quire's extension is there: its operations look at the device."""
    for name, operation in list(vars(metal_ext).items()):
        if type(operation).__name__ == "nb_func" and name not in WITHOUT_STREAM:
            setattr(metal_ext, name, on_its_device(name, operation, metal_ext.MetalKVBackend))
    said = metal_ext.metal_capabilities

    def metal_capabilities() -> dict[str, Any]:
        begin()
        return {**said(), **figures()}

    metal_ext.metal_capabilities = metal_capabilities  # type: ignore[attr-defined]


def begin(_: ModuleType | None = None) -> None:
    """The computer gets its GPU. Not before somebody asks: the fake one watches for signals."""
    from tests.metal.graph import _standin

    if Gpu.take_mistakes is None:
        _standin.start(1, set((FOLDER / "lacks").read_text().splitlines()))
        Gpu.take_mistakes = _standin.take_mistakes
        atexit.register(tell_mistakes)
        os.register_at_fork(after_in_child=forget_device)  # a forked child has no thread of its


def on_its_device(name: str, operation: Callable[..., Any], kv_backend: type) -> Callable[..., Any]:
    """The operation, which MLX runs on its default device."""

    @functools.wraps(operation)
    def checked(*arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        on_gpu = name in OF_A_GPU or any(isinstance(each, kv_backend) for each in given)
        if on_gpu != ("gpu" in str(Gpu.default)):
            raise RuntimeError((WRONG_ON_CPU if on_gpu else WRONG_ON_GPU).format(name))
        return operation(*arguments, **named)

    return checked


def figures() -> dict[str, int]:
    """What the Mac's device says of its memory."""
    return {file.name: int(file.read_text()) for file in (FOLDER / "gpu").iterdir()}


def forget_device() -> None:
    """It is another process's."""
    Gpu.take_mistakes = None


def tell_mistakes() -> None:
    """What Metal or MLX would not have let pass."""
    if Gpu.take_mistakes is not None:
        with (FOLDER / "mistakes").open("a") as file:
            file.writelines(f"{mistake}\n" for mistake in Gpu.take_mistakes())
