"""quire's programs as on a Mac, over the stand-ins of ../graph."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from tests.abuse import processes
from tests.clients.servers import Process
from tests.metal.darwin.macs import Mac

RUNG = Path(__file__).parent
ROOT = RUNG.parents[2]
BUILD = ROOT / "build/metal/darwin"
STANDINS = ROOT / "build/metal/graph"
VENV = ROOT / ".venv"


def command(mac: Mac, figures: Path, program: str) -> list[str]:
    """What starts a program of the environment on that Mac."""
    begin = f'ulimit -Sn 256 && ulimit -Hn {mac.hard_limit} && exec env "$@"'
    settings = [f"{name}={value}" for name, value in environment(figures).items()]
    return ["sh", "-c", begin, "sh", *settings, str(VENV / "bin" / program)]


def environment(figures: Path) -> dict[str, str]:
    """Variables for a process on a Mac whose figures are in that folder."""
    (site,) = VENV.glob("lib/python3*/site-packages")
    libraries = (STANDINS / "cmake", site / "mlx/lib")
    # Of what changes sources on their way to bytecode.
    digest = sha256((RUNG / "personality.py").read_bytes()).hexdigest()[:12]
    return {
        "DARWIN_EXTENSION": str(STANDINS / "mac"),
        "DARWIN_FIGURES": str(figures),
        "HOME": str(figures),
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "LD_PRELOAD": str(BUILD / "libdarwin.so"),
        "MLX_DISABLE_COMPILE": "1",  # by g++
        # Each process would translate and compile all of it again.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": ":".join(map(str, (RUNG / "site", ROOT))),
        "PYTHONPYCACHEPREFIX": str(BUILD / f"pycache-{digest}"),
    }


def stage() -> None:
    """Put the extension as for a Mac where the environment finds it."""
    there = STANDINS / "mac" / "metal_ext"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir(parents=True)
    for source in (ROOT / "metal_ext").glob("*.py*"):
        shutil.copy(source, there)
    shutil.copy(STANDINS / "cmake" / "_ext_mac.so", there / "_ext.so")


@contextmanager
def serving(mac: Mac, folder: Path, model: Path, *flags: str) -> Iterator[Process]:
    """A server on that Mac; at the end its device has found no mistake."""
    figures = mac.told(folder)
    with processes.serving(model, *flags, quire=command(mac, figures, "quire")) as server:
        yield server
    assert (figures / "mistakes").read_text() == ""
