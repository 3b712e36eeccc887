"""The program of a self-test: ``python -m kvcache.selftest TEST KV_BACKEND [PAGE_BYTES [SIZE]]``.

It prints the results as a line of JSON, and exits without freeing memory."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx

import metal_ext
from kvcache.backends.backend import PageBackend
from kvcache.backends.choice import KVBackend
from kvcache.backends.metal import WIDE_HEAD
from kvcache.backends.new import new_backends
from kvcache.layout import KVLayout, KVShape, KVSpec
from kvcache.selftest import kernels
from kvcache.selftest.kernels import (
    BandwidthChecks,
    KernelChecks,
    equal_bits_checks,
    kernel_specs,
    name_of,
    product_checks,
)
from kvcache.selftest.kv_backend import (
    MAX_TOKENS,
    SHAPE,
    KVBackendChecks,
    NamedCheck,
    RealSizeChecks,
    run_checks,
    small_layout,
)
from kvcache.selftest.run import BEGINS, CacheSize, Result, SelfTest, to_line
from kvcache.selftest.stress import ReleaseChecks, StressChecks

# The pause after which speed is measured. Some systems reclaim GPU memory after an idle second.
PAUSE_S = 2.0
WARM_UPS = 3
# The weights take 256 MiB. If the system reclaims so much, fetching it again takes noticeably long.
MATRICES, SIZE = 8, 4096
# The number of commands to submit. One step of a 36-layer model has about as many.
COMMANDS = 600
# The K and V whose reading is timed: one layer of a common shape, 64 MiB per sequence.
LONG_SHAPE, LONG_TOKENS = KVShape.uniform(1, KVSpec(8, 128)), 16384
# The number of buffers (address ranges of sequences) of a small cache.
MAX_BUFFERS = 3
# The K and V whose kernels are tested at each start: MLX has a kernel of its own for such heads.
WIDE = KVSpec(kernels.KV_HEADS, WIDE_HEAD)


def main(arguments: list[str]) -> None:
    """``arguments`` are those in the module's docstring. An empty PAGE_BYTES means the default."""
    test, kv_backend = SelfTest(arguments[0]), KVBackend[arguments[1]]
    page_bytes = int(arguments[2]) if arguments[2:] and arguments[2] else None
    size = CacheSize.from_argument(arguments[3]) if arguments[3:] else None
    mx.set_default_device(mx.Device(mx.gpu if kv_backend.on_gpu else mx.cpu))
    results = run_checks(checks_of(test, kv_backend, page_bytes, size), _report_begin)
    sys.stdout.write(to_line(results) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _report_begin(name: str) -> None:
    sys.stderr.write(f"{BEGINS}{name}\n")
    sys.stderr.flush()


def checks_of(
    test: SelfTest, kv_backend: KVBackend, page_bytes: int | None, size: CacheSize | None = None
) -> Iterator[NamedCheck]:
    """Yield the checks of a self-test. If ``size`` is given, also check a cache of this size."""
    match test:
        case SelfTest.KV_BACKEND:
            yield from _on_backend(KVBackendChecks, kv_backend, page_bytes=page_bytes)
            yield from product_checks(on_gpu=kv_backend.on_gpu)
            yield from _on_kernels(kv_backend, WIDE)
            if size is not None:
                checks = partial(RealSizeChecks, buffers=size.buffers)
                yield from _on_backend(checks, kv_backend, page_bytes=page_bytes, size=size)
        case SelfTest.RELEASE:
            yield from _on_backend(ReleaseChecks, kv_backend, page_bytes=page_bytes)
        case SelfTest.STRESS:
            yield from _on_backend(StressChecks, kv_backend, page_bytes=page_bytes)
        case SelfTest.PACE:
            yield "pause", _measure_pause
            yield "submit", _measure_submission
        case SelfTest.BANDWIDTH:
            yield from _on_backend(BandwidthChecks, kv_backend, LONG_SHAPE, LONG_TOKENS)
        case SelfTest.EQUAL_BITS:
            yield from equal_bits_checks(on_gpu=kv_backend.on_gpu)
        case _:
            assert test is SelfTest.KERNELS
            for spec in kernel_specs(kv_backend.on_gpu):
                yield from _on_kernels(kv_backend, spec)


def _on_kernels(kv_backend: KVBackend, spec: KVSpec) -> Iterator[NamedCheck]:
    new_checks = partial(KernelChecks, on_gpu=kv_backend.on_gpu)
    shape = KVShape.uniform(1, spec)
    for name, check in _on_backend(new_checks, kv_backend, shape, kernels.MAX_TOKENS):
        yield f"{name_of(spec)}: {name}", check


def _on_backend(
    new_checks: Callable[[PageBackend, KVLayout], KVBackendChecks | KernelChecks],
    kv_backend: KVBackend,
    shape: KVShape = SHAPE,
    max_tokens: int = MAX_TOKENS,
    page_bytes: int | None = None,
    size: CacheSize | None = None,
) -> Iterator[NamedCheck]:
    """Yield a check that makes a cache, then its checks. Without ``size``, the cache is small."""
    checks: KVBackendChecks | KernelChecks

    def open_backend() -> Result:
        nonlocal checks
        layout = small_layout(
            kv_backend,
            shape if size is None else size.shape,
            max_tokens=max_tokens if size is None else size.max_tokens,
            system_page_bytes=metal_ext.SYSTEM_PAGE_BYTES,
            page_bytes=page_bytes,
            heap_bytes=None if size is None else size.heap_bytes,
        )
        (backend,) = new_backends(
            kv_backend,
            layout.groups,
            max_buffers=MAX_BUFFERS if size is None else size.buffers,
            release_heaps=new_checks is ReleaseChecks,
            maps_while_running=new_checks is StressChecks,
            workers=None if kv_backend.on_gpu else metal_ext.CpuWorkers(1),
        )
        checks = new_checks(backend, layout)
        return Result(f"pages of {layout.groups[0].page_bytes} bytes")

    yield "open", open_backend
    yield from checks.checks()


# --- measuring the speed of the device ------------------------------------------------------------


def _measure_pause() -> Result:
    weights = [mx.random.normal((SIZE, SIZE)).astype(mx.bfloat16) for _ in range(MATRICES)]
    mx.eval(weights)
    inputs = mx.random.normal((1, SIZE)).astype(mx.bfloat16)

    def seconds() -> float:
        started = time.monotonic()
        mx.eval([inputs @ matrix for matrix in weights])
        return time.monotonic() - started

    warm = min(seconds() for _ in range(WARM_UPS))
    time.sleep(PAUSE_S)
    after = seconds()
    text = f"{1e3 * warm:.1f} ms, and {1e3 * after:.1f} ms after {PAUSE_S:g} s without work"
    return Result(text, {"warm_s": warm, "after_pause_s": after, "pause_s": PAUSE_S})


def _measure_submission() -> Result:
    value = mx.zeros((1024,))
    for _ in range(COMMANDS):
        value = mx.sin(value)
    started = time.monotonic()
    mx.async_eval(value)  # type: ignore[no-untyped-call]
    submitted = time.monotonic() - started
    mx.eval(value)
    done = time.monotonic() - started
    text = (
        f"{COMMANDS} commands are submitted in {1e3 * submitted:.1f} ms, done by {1e3 * done:.1f}"
    )
    return Result(text, {"commands": COMMANDS, "submit_s": submitted, "done_s": done})


if __name__ == "__main__":
    main(sys.argv[1:])
