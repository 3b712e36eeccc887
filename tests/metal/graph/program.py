"""quire's programs over the stand-ins, in processes of their own.

    python -P -S -m tests.metal.graph.program quire ARGUMENTS...
    python -P -S -m tests.metal.graph.program MODULE ARGUMENTS...

The paths are those of `make -C tests/metal graph`. The machine says that it has a GPU, and MLX
computes on its CPU streams. An interpreter that is started from there starts this again. A signal
has the device fail from then on: SIGUSR1, it maps nothing any more; SIGUSR2, its next command ends
with an error: one of quire's own, or of MLX's where METAL_ERROR names one (``MetalError``).
"""

import os
import runpy
import signal
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.metal.graph import _standin

# What a mapping may take while serving: nobody waits for twenty seconds.
MAPPING_LIMIT_S = 3.0
# Of the stress test, which has fifty. A processor takes seconds for one.
ROUNDS = 10
DRIVERS_WORDS = "an error that the driver does not explain"
INTERPRETER = "STANDIN_INTERPRETER"
METAL_ERROR = "STANDIN_METAL_ERROR"
# A step with this token fails as if the signal had come.
CULPRIT = 511


class MetalError:
    """An error of Metal in a step of MLX's, as METAL_ERROR describes it: the place of the layer
    whose command buffer fails, and Metal's words. MLX throws where it meets the error: while it
    submits the rest of the step if the first layer has failed, with the next step's commands if a
    middle one has, and where the step is awaited if the last one has."""

    def __init__(self, place: str, words: str) -> None:
        self._place = place
        self._words = f"[METAL] Command buffer execution failed: {words}."
        self._has_failed = False
        self.is_armed = False
        mx.async_eval = self._meeting(mx.async_eval, "first")
        mx.eval = self._meeting(mx.eval, "last")
        from engine.step.plan import PendingToken
        from engine.step.runner import ModelRunner

        batch = ModelRunner._batch

        def watched(runner: Any, entries: Any) -> Any:
            known = [its.tokens for its in entries if not isinstance(its.tokens, PendingToken)]
            self.is_armed |= any(CULPRIT in tokens for tokens in known)
            return batch(runner, entries)

        ModelRunner._batch = watched  # type: ignore[assignment, method-assign]

    def arm(self) -> None:
        self.is_armed = True

    def _meeting(self, call: Callable[..., None], place: str) -> Callable[..., None]:
        """A call of MLX's that meets errors at a place."""

        def meeting(*arrays: Any) -> None:
            if self.is_armed and (self._place == place or self._has_failed):
                raise RuntimeError(self._words)
            self._has_failed = self.is_armed and self._place == "middle" and place == "first"
            call(*arrays)

        return meeting


def interpreter(folder: Path) -> Path:
    """A command that takes ``-m MODULE ARGUMENTS``, as Python does; made in a folder."""
    path = folder / "python-over-standins"
    path.write_text(
        f'#!/bin/sh\nwhile [ "$1" = -P ] || [ "$1" = -m ]; do shift; done\n{INTERPRETER}="$0" '
        f'exec "{sys.executable}" -P -S -m tests.metal.graph.program "$@"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def main() -> None:
    """Becomes the program."""
    program, *arguments = sys.argv[1:]
    _standin.start(1)
    signal.signal(signal.SIGUSR1, lambda *_: _standin.stall_mappings())
    signal.signal(signal.SIGUSR2, lambda *_: _standin.fail_next_commands(DRIVERS_WORDS))
    if (error := os.environ.get(METAL_ERROR)) and "serve" in arguments:
        metal = MetalError(*error.split(":", 1))
        signal.signal(signal.SIGUSR2, lambda *_: metal.arm())
    sys.executable = os.environ[INTERPRETER]
    sys.argv = [program, *arguments]
    # What the stress test is about.
    _standin.allow_maps_beside_commands("stress" in arguments)
    from kvcache.selftest import stress

    stress.StressChecks = partial(stress.StressChecks, rounds=ROUNDS)  # type: ignore[assignment, misc]
    if "serve" in arguments:
        import kvcache.backends.backend

        kvcache.backends.backend.MAPPING_LIMIT_S = MAPPING_LIMIT_S
    mx.set_default_device(mx.Device(mx.cpu))
    mx.set_default_device = lambda device: None
    if program == "quire":
        from server.cli.commands import main as quire

        quire()
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
