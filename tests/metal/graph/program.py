"""quire's programs over the stand-ins, in processes of their own.

    python -P -S -m tests.metal.graph.program quire ARGUMENTS...
    python -P -S -m tests.metal.graph.program MODULE ARGUMENTS...

The paths are those of `make -C tests/metal graph`. The machine says that it has a GPU, and MLX
computes on its CPU streams. An interpreter that is started from there starts this again. A signal
has the device fail from then on: SIGUSR1, it maps nothing any more; SIGUSR2, its next command ends
with an error.
"""

import os
import runpy
import signal
import stat
import sys
from pathlib import Path

import mlx.core as mx

from tests.metal.graph import _standin

# What a mapping may take while serving: nobody waits for twenty seconds.
MAPPING_LIMIT_S = 3.0
DRIVERS_WORDS = "an error that the driver does not explain"
INTERPRETER = "STANDIN_INTERPRETER"


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
    sys.executable = os.environ[INTERPRETER]
    sys.argv = [program, *arguments]
    # What the stress test is about.
    _standin.allow_maps_beside_commands("stress" in arguments)
    if "serve" in arguments:
        import kvcache.backend

        kvcache.backend.MAPPING_LIMIT_S = MAPPING_LIMIT_S
    mx.set_default_device(mx.Device(mx.cpu))
    mx.set_default_device = lambda device: None
    if program == "quire":
        from server.cli.commands import main as quire

        quire()
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
