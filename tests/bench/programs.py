"""What servers are started from: quire, mlx-lm's and llama.cpp's, and any other command line."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

HOST = "127.0.0.1"
OURS = "quire"


@dataclass(frozen=True, slots=True)
class Program:
    """A server that tests.bench.launch starts."""

    label: str
    name: str
    """As tests.bench.launch knows it."""
    arguments: tuple[str, ...]
    model: str
    proves_products: bool = False
    """Whether it must multiply with the fast BLAS, or the comparison would say nothing."""
    has_our_model: bool = True
    """Whether the benchmark made its model, so that all lengths are known."""

    def command(self, port: int, threads: int) -> list[str]:
        """Through tests.bench.launch."""
        command = [sys.executable, "-m", "tests.bench.launch", self.name]
        return [*command, *self.arguments, "--host", HOST, "--port", str(port)]

    def told(self, label: str, *arguments: str) -> "Program":
        """The same by another name, with further arguments."""
        return replace(self, label=label, arguments=(*self.arguments, *arguments))


@dataclass(frozen=True, slots=True)
class Command:
    """A server of somebody else's, by its command line. {port} and {threads} stand for themselves;
    it has to listen on the loopback interface."""

    label: str
    line: str
    model: None = None  # it is asked
    proves_products: bool = False
    has_our_model: bool = False

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


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """A llama-server that was built here, on weights of the benchmark's."""

    programs: Path
    """The folder that it lies in."""
    kernels: Path
    """The folder whose libggml-cpu.so it multiplies by."""
    weights: Path
    """A GGUF file."""
    slots: int
    slot_tokens: int
    """Of a prompt and its answer."""
    label: str = "llama-server"
    model: None = None
    proves_products: bool = False
    has_our_model: bool = True

    @property
    def variables(self) -> Mapping[str, str]:
        """The loader looks there before it looks where the program was linked."""
        before = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": f"{self.kernels}:{before}" if before else str(self.kernels)}

    def command(self, port: int, threads: int) -> list[str]:
        """As many threads for prompts as for answers; no second cache of prompts, and no page."""
        arguments = {
            "-m": self.weights,
            "--host": HOST,
            "--port": port,
            "-t": threads,
            "-tb": threads,
            "-np": self.slots,
            "-c": self.slots * self.slot_tokens,
            "--cache-ram": 0,
        }
        words = [str(word) for pair in arguments.items() for word in pair]
        return [str(self.programs / "llama-server"), *words, "--jinja", "--no-webui"]


Startable = Program | Command | LlamaServer


def quire(folder: Path, threads: int) -> Program:
    """Our own server, with its defaults."""
    arguments = ["serve", str(folder), "--kv-backend", "posix", "--served-model-name", "bench"]
    arguments += ["--threads", str(threads), "--log-level", "warning"]
    return Program(OURS, "quire", tuple(arguments), "bench")


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
