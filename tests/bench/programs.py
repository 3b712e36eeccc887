"""What servers are started from: quire, mlx-lm's server, and any other command line."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

HOST = "127.0.0.1"


class Startable(Protocol):
    """What a server is started from."""

    @property
    def label(self) -> str:
        """Its name in the table."""
        ...

    @property
    def model(self) -> str | None:
        """What the server calls its model; None: it has to be asked."""
        ...

    @property
    def proves_products(self) -> bool:
        """Whether it must multiply with the fast BLAS, or the comparison would say nothing."""
        ...

    def command(self, port: int, threads: int) -> list[str]:
        """Program and arguments."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """A server that tests.bench.launch starts."""

    label: str
    name: str
    """As tests.bench.launch knows it."""
    arguments: tuple[str, ...]
    model: str
    proves_products: bool = False

    def command(self, port: int, threads: int) -> list[str]:
        """Through tests.bench.launch."""
        command = [sys.executable, "-m", "tests.bench.launch", self.name]
        return [*command, *self.arguments, "--host", HOST, "--port", str(port)]


@dataclass(frozen=True, slots=True)
class Command:
    """A server of somebody else's, by its command line. {port} and {threads} stand for themselves;
    it has to listen on the loopback interface."""

    label: str
    line: str
    model: None = None
    proves_products: bool = False

    @classmethod
    def parse(cls, text: str) -> "Command":
        """Of NAME=COMMAND. Raises ValueError."""
        label, line = named(text)
        if "{port}" not in line:
            raise ValueError(f"{text!r}: the command has no {{port}}")
        return cls(label, line)

    def command(self, port: int, threads: int) -> list[str]:
        """The words of the line."""
        values = {"{port}": str(port), "{threads}": str(threads)}
        words = shlex.split(self.line)
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        return words


def quire(folder: Path, threads: int, substrate: str = "posix") -> Program:
    """Our own server, with its defaults."""
    arguments = ["serve", str(folder), "--substrate", substrate, "--served-model-name", "bench"]
    arguments += ["--threads", str(threads)]
    label = "quire" if substrate == "posix" else f"quire {substrate}"
    return Program(label, "quire", (*arguments, "--log-level", "warning"), "bench")


def mlx_lm_server(folder: Path, concurrency: int) -> Program:
    """mlx-lm's server on a float32 model, the only ones that it multiplies fast: it may batch as
    many requests as there are streams, in both phases."""
    arguments = ["--model", str(folder), "--log-level", "WARNING"]
    arguments += ["--decode-concurrency", str(concurrency)]
    arguments += ["--prompt-concurrency", str(concurrency)]
    return Program(
        "mlx_lm.server", "mlx_lm.server", tuple(arguments), "default_model", proves_products=True
    )


def named(text: str) -> tuple[str, str]:
    """NAME=REST, taken apart. Raises ValueError."""
    label, equals, rest = text.partition("=")
    if not label or not equals or not rest:
        raise ValueError(f"{text!r} is not NAME=...")
    return label, rest
