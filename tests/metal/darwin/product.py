"""A checkout of quire that is run as on a Mac."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.abuse.processes import Process, serving
from tests.metal.darwin.macs import Mac

RUNG = Path(__file__).parent
BUILD = RUNG.parents[2] / "build" / "metal" / "darwin"
OTHER = "DARWIN_PRODUCT"
"""Variables: a checkout other than this one, prepared, and the folder of its Python's programs."""
OTHER_BIN = "DARWIN_PRODUCT_BIN"


@dataclass(frozen=True, slots=True)
class Product:
    """folder: the checkout, with the stand-ins built in it. bin: of its environment."""

    folder: Path
    bin: Path

    @classmethod
    def chosen(cls) -> "Product":
        """This checkout, or the one that this process was told."""
        here = RUNG.parents[2]
        folder = Path(os.environ.get(OTHER, here))
        return cls(folder, Path(os.environ.get(OTHER_BIN, here / ".venv" / "bin")))

    def command(self, mac: Mac, figures: Path, program: str) -> list[str]:
        """What starts a program of the environment on that Mac."""
        environment = self.environment(figures)
        begin = f'ulimit -Sn 256 && ulimit -Hn {mac.hard_limit} && exec env "$@"'
        settings = [f"{name}={value}" for name, value in environment.items()]
        return ["sh", "-c", begin, "sh", *settings, str(self.bin / program)]

    def environment(self, figures: Path) -> dict[str, str]:
        """Variables for a process on a Mac whose figures are in that folder."""
        (site,) = self.bin.parent.glob("lib/python3*/site-packages")
        libraries = (self.build / "cmake", site / "mlx/lib")
        return {
            "DARWIN_EXTENSION": str(self.build / "mac"),
            "DARWIN_FIGURES": str(figures),
            "HOME": str(figures),
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "LD_PRELOAD": str(BUILD / "libdarwin.so"),
            # Each process would translate and compile all of it again.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": ":".join(map(str, (RUNG / "site", self.folder))),
            "PYTHONPYCACHEPREFIX": str(BUILD / f"pycache-{digest()}"),
        }

    def stage(self) -> None:
        """The extension as for a Mac, where the environment finds it."""
        there = self.build / "mac" / "metal_ext"
        shutil.rmtree(there, ignore_errors=True)
        there.mkdir(parents=True)
        for source in (self.folder / "metal_ext").glob("*.py*"):
            shutil.copy(source, there)
        shutil.copy(self.build / "cmake" / "_ext_mac.so", there / "_ext.so")

    @property
    def build(self) -> Path:
        return self.folder / "build" / "metal" / "graph"

    @contextmanager
    def serving(self, mac: Mac, folder: Path, model: Path, *flags: str) -> Iterator[Process]:
        """A server on that Mac; at the end its device has found no mistake."""
        figures = mac.told(folder)
        with serving(model, *flags, quire=self.command(mac, figures, "quire")) as server:
            yield server
        assert (figures / "mistakes").read_text() == ""


def digest() -> str:
    """Of what changes sources on their way to bytecode."""
    return sha256((RUNG / "personality.py").read_bytes()).hexdigest()[:12]
