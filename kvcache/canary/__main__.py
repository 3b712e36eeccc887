"""The process that a trial is made in.

    python -m kvcache.canary TASK SUBSTRATE [PAGE_BYTES [SIZE]]

Ends with one line of JSON on standard output, and without cleaning up: what is left behind after an
ordered end is the system's.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import mlx.core as mx

import metal_ext
from kvcache.backend import PageBackend
from kvcache.canary import kernels, trial
from kvcache.canary.kernels import KernelTrial, kernel_specs, name_of
from kvcache.canary.products import product_actions
from kvcache.canary.release import ReleaseTrial
from kvcache.canary.report import Step, to_line
from kvcache.canary.run import BEGINS, KERNELS, PACE, RELEASE, STRESS, SUBSTRATE, CacheSize
from kvcache.canary.stress import StressTrial
from kvcache.canary.trial import (
    Action,
    Finding,
    RealSizeTrial,
    SubstrateTrial,
    attempt,
    small_layout,
)
from kvcache.layout import KVLayout, KVShape
from kvcache.new_backend import new_backends
from kvcache.substrates import Substrate

# Systems have been seen to let go of memory that the GPU has not used for a second.
PAUSE_S = 2.0
WARM_UPS = 3
# 256 MiB of weights in 16 bits: enough that fetching them again shows.
MATRICES, SIZE = 8, 4096
# About those of a step of a model of 36 layers.
COMMANDS = 600


def pace_actions() -> list[tuple[str, Action]]:
    """All that is measured, in order."""
    return [("pause", _pause), ("submit", _submit)]


def _pause() -> Finding:
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
    said = f"{1e3 * warm:.1f} ms, and {1e3 * after:.1f} ms after {PAUSE_S:g} s without work"
    return Finding(said, {"warm_s": warm, "after_pause_s": after, "pause_s": PAUSE_S})


def _submit() -> Finding:
    value = mx.zeros((1024,))
    for _ in range(COMMANDS):
        value = mx.sin(value)
    started = time.monotonic()
    mx.async_eval(value)  # type: ignore[no-untyped-call]
    submitted = time.monotonic() - started
    mx.eval(value)
    done = time.monotonic() - started
    said = (
        f"{COMMANDS} commands are submitted in {1e3 * submitted:.1f} ms, done by {1e3 * done:.1f}"
    )
    return Finding(said, {"commands": COMMANDS, "submit_s": submitted, "done_s": done})


# Buffers of a trial.
MAX_BUFFERS = 3


class Trial(Protocol):
    """What is tried with one backend."""

    def actions(self) -> list[tuple[str, Action]]:
        """All of it, in order."""


MakeTrial = Callable[[PageBackend, KVLayout], Trial]


def main(arguments: list[str]) -> None:
    """arguments: TASK SUBSTRATE [PAGE_BYTES [SIZE]]; an empty PAGE_BYTES is the usual one."""
    what, substrate = arguments[0], Substrate[arguments[1]]
    page_bytes = int(arguments[2]) if arguments[2:] and arguments[2] else None
    size = CacheSize.from_argument(arguments[3]) if arguments[3:] else None
    mx.set_default_device(mx.Device(mx.gpu if substrate.on_gpu else mx.cpu))
    sys.stdout.write(to_line(run_task(what, substrate, page_bytes, size)) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_task(
    what: str, substrate: Substrate, page_bytes: int | None, size: CacheSize | None = None
) -> list[Step]:
    """The steps of a task, up to the first one that failed. size: of a real cache, if one is tried
    as well."""
    if what == SUBSTRATE:
        return _try_all(substrate, page_bytes, size)
    if what == RELEASE:
        return _try_out(substrate, trial.SHAPE, ReleaseTrial, trial.MAX_TOKENS, page_bytes)
    if what == STRESS:
        return _try_out(substrate, trial.SHAPE, StressTrial, trial.MAX_TOKENS, page_bytes)
    if what == PACE:
        return attempt(pace_actions(), _begins)
    assert what == KERNELS, what
    steps: list[Step] = []
    kernel_trial = partial(KernelTrial, on_gpu=substrate.on_gpu)
    for spec in kernel_specs(substrate.on_gpu):
        tried = _try_out(substrate, KVShape.uniform(1, spec), kernel_trial, kernels.MAX_TOKENS)
        steps += [replace(step, name=f"{name_of(spec)}: {step.name}") for step in tried]
        if not steps[-1].passed:
            break
    return steps


def _try_all(substrate: Substrate, page_bytes: int | None, size: CacheSize | None) -> list[Step]:
    """What serving needs: pages, products, and as many addresses."""
    steps = _try_out(substrate, trial.SHAPE, SubstrateTrial, trial.MAX_TOKENS, page_bytes)
    if steps[-1].passed:
        steps += attempt(product_actions(), _begins)
    if size is None or not steps[-1].passed:
        return steps
    return steps + _try_out(
        substrate,
        size.shape,
        lambda backend, layout: RealSizeTrial(backend, layout, size.buffers),
        size.max_tokens,
        page_bytes,
        size,
    )


def _try_out(
    substrate: Substrate,
    shape: KVShape,
    make_trial: MakeTrial,
    max_tokens: int,
    page_bytes: int | None = None,
    size: CacheSize | None = None,
) -> list[Step]:
    """One backend, from its making to its end. size: None for one heap that has all tokens, and
    few buffers."""
    made: list[Trial] = []

    def open_backend() -> Finding:
        layout = small_layout(
            substrate,
            shape,
            max_tokens=max_tokens,
            system_page_bytes=metal_ext.SYSTEM_PAGE_BYTES,
            page_bytes=page_bytes,
            heap_bytes=None if size is None else size.heap_bytes,
        )
        (backend,) = new_backends(
            substrate,
            layout.groups,
            max_sequences=MAX_BUFFERS if size is None else size.buffers,
            release_heaps=make_trial is ReleaseTrial,
            maps_while_running=make_trial is StressTrial,
            workers=None if substrate.on_gpu else metal_ext.CpuWorkers(1),
        )
        made.append(make_trial(backend, layout))
        return Finding(f"pages of {layout.groups[0].page_bytes} bytes")

    steps = attempt([("open", open_backend)], _begins)
    return steps + (attempt(made[0].actions(), _begins) if made else [])


def _begins(step: str) -> None:
    sys.stderr.write(f"{BEGINS}{step}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
