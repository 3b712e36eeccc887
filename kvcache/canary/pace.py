"""What a GPU's times depend on beside its work: how long it was idle before, and how far ahead its
commands can be submitted. Nothing here passes or fails."""

import time

import mlx.core as mx

from kvcache.canary.trial import Action, Finding

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
