"""The executor itself: what it must see in wrong kernels, and that it computes as Apple's GPUs do.

MLX's attention kernel is known to be right on them, and its text comes with MLX.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.kernels.device import Device, library_path, struct
from tests.metal.kernels.formats import BFLOAT, FLOAT, Format

MISTAKES = Path(os.environ["MSL_MISTAKES"])
CALIBRATION = Path(os.environ["MSL_CALIBRATION"])
LAUNCH = """
import sys
import numpy as np
from tests.metal.kernels.device import Device
buffer = np.zeros(4096, np.float32) if {bound} else 0
Device({path!r}).{how}({name!r}, [buffer], {grid}, {threads})
"""


def stderr_of(
    name: str, threads: tuple[int, ...], how: str = "threadgroups", bound: bool = True
) -> str:
    """What the process says that runs one threadgroup of a wrong kernel, and dies of it."""
    grid = (1,) if how == "threadgroups" else threads
    script = LAUNCH.format(
        path=str(MISTAKES), name=name, grid=grid, threads=threads, how=how, bound=bound
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode < 0, "it lives"
    return done.stderr


@pytest.mark.parametrize(
    ("name", "threads", "words"),
    [
        ("divergent_sum", 32, "simd_sum"),
        ("different_sums", 32, "comes to simd_sum in line 18 while others of its simdgroup wait"),
        ("barrier_in_a_branch", 64, "threadgroup_barrier"),
        ("barrier_of_some_simdgroups", 64, "threadgroup_barrier"),
        ("different_barriers", 64, "while others of its threadgroup wait"),
        ("too_much_memory", 32, "32784 bytes of threadgroup memory; there are 32768"),
        ("absent_lane", 1, "takes from lane 16, which does not exist"),
        ("fifth_component", 8, "component 4 of a vector of 4"),
        ("few_threads", 65, "a threadgroup of a size that the kernel cannot have"),
        ("ordered_memory", 1056, "a threadgroup of a size that the kernel cannot have"),
    ],
)
def test_a_wrong_kernel_ends_with_a_line_that_says_what(
    name: str, threads: int, words: str
) -> None:
    said = stderr_of(name, (threads,))
    assert f"MSL: {name}" in said
    assert words in said


def test_a_buffer_that_is_not_bound_is_named() -> None:
    assert "buffer 0 is not bound" in stderr_of("few_threads", (32,), bound=False)


def test_every_kernel_that_the_host_can_name_is_found_by_that_name() -> None:
    library = ctypes.CDLL(str(library_path()))
    library.find_launcher.restype = ctypes.POINTER(ctypes.c_char_p)
    listing = subprocess.run([library_path().with_name("print_kernels")], capture_output=True)
    names = [line.split()[0] for line in listing.stdout.splitlines()]
    assert len(names) > 200
    for name in names:
        found = library.find_launcher(name)
        assert found, name
        assert found[0] == name
    assert not library.find_launcher(b"decode_split_float_float_96_sparse")


def test_threadgroup_memory_holds_nothing_before_it_is_written() -> None:
    out = np.zeros(64, np.float32)
    Device(MISTAKES).threadgroups("unwritten_memory", [out], (1,), (64,))
    assert np.isnan(out).all()


@pytest.mark.parametrize(("name", "right"), [("unordered_memory", False), ("ordered_memory", True)])
def test_a_missing_barrier_shows(name: str, right: bool) -> None:
    out = np.zeros(64, np.float32)
    Device(MISTAKES).threadgroups(name, [out], (1,), (64,))
    assert np.array_equal(out, np.arange(63, -1, -1)) == right


def test_threads_of_a_grid_that_is_no_multiple_get_smaller_threadgroups_at_its_edges() -> None:
    out = np.full((5, 40), np.nan, np.float32)
    Device(MISTAKES).threads("grid_sums", [out], (40, 5), (32, 2))
    whole = np.full((4, 32), 32.0)
    assert np.array_equal(out[:4, :32], whole)
    assert (out[:4, 32:] == 16).all(), "8 x 2 threads of one simdgroup"
    assert (out[4, :32] == 32).all()
    assert (out[4, 32:] == 8).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("number", "dim", "most"), [(FLOAT, 64, 2e-6), (BFLOAT, 128, 8e-3)])
def test_mlx_own_kernel_computes_what_mlx_computes(
    number: Format, dim: int, most: float, causal: bool, figures: list[str]
) -> None:
    heads, kv_heads, length, rows = 8, 2, 77, 3
    random = np.random.default_rng(0)
    queries = number.encode(random.normal(size=(1, heads, rows, dim)))
    keys, values = (number.encode(random.normal(size=(1, kv_heads, length, dim))) for _ in range(2))
    out = number.nans(1, heads, rows, dim)
    strides = [struct(np.dtype("u8"), s)[0] for s in ((length * dim,), (dim,)) * 2]
    scale = np.float32(dim**-0.5)
    device = Device(CALIBRATION / ("causal.so" if causal else "full.so"))
    unused = [np.zeros(1, np.int32)] * 7
    device.threadgroups(
        f"sdpa_vector_{number.name}_{dim}",
        [
            *(queries, keys, values, out),
            *(np.array([heads // kv_heads], np.int32), np.array([length], np.int32)),
            *[np.array([s], np.uint64) for s in strides],
            *(np.array([scale]), *unused),
        ],
        (heads, rows),
        (1024,),
    )
    wanted = mx.fast.scaled_dot_product_attention(
        *(mx.array(number.decode(x).astype(np.float32)) for x in (queries, keys, values)),
        scale=float(scale),
        mask="causal" if causal else None,
    )
    error = float(np.abs(number.decode(out) - np.array(wanted)).max())
    figures.append(
        f"MLX's sdpa_vector, {number.name:6} head_dim {dim:3}, {'causal' if causal else 'full':6}: "
        f"differs from MLX by {error:.1e}"
    )
    assert error <= most
