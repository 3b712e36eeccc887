"""The servers of a comparison: quire, mlx-lm's and llama.cpp's, any other command line, each a
child process on a free loopback port; and servers that run already."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO

from tests.bench.launch import PRODUCTS
from tests.bench.limits import compiled
from tests.bench.load import Target
from tests.ports import HeldPort

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
        command = [sys.executable, "-m", "tests.bench.launch", self.name]
        return [*command, *self.arguments, "--host", HOST, "--port", str(port)]

    def told(self, label: str, *arguments: str) -> "Program":
        """Return the same program under another name, with further arguments."""
        return replace(self, label=label, arguments=(*self.arguments, *arguments))


@dataclass(frozen=True, slots=True)
class Command:
    """A server of another project, by its command line, which must listen on the loopback
    interface. {port} and {threads} are replaced."""

    label: str
    line: str
    model: None = None  # read from the running server
    proves_products: bool = False
    has_our_model: bool = False

    @classmethod
    def parse(cls, text: str) -> "Command":
        """Parse NAME=COMMAND. Raises ValueError."""
        label, line = named(text)
        if "{port}" not in line:
            raise ValueError(f"{text!r}: the command has no {{port}}")
        return cls(label, line)

    def command(self, port: int, threads: int) -> list[str]:
        values = {"{port}": str(port), "{threads}": str(threads)}
        words = shlex.split(self.line)
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        return words


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """A llama-server that llama.py built, on weights of the benchmark's."""

    programs: Path
    """The folder that it lies in."""
    kernels: Path
    """The folder whose libggml-cpu.so it multiplies by."""
    weights: Path
    """A GGUF file."""
    slots: int
    slot_tokens: int
    """Tokens of a prompt and its answer."""
    label: str = "llama-server"
    model: None = None
    proves_products: bool = False
    has_our_model: bool = True

    @property
    def variables(self) -> Mapping[str, str]:
        """Return the loader's first folder, before those that the program was linked with."""
        before = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": f"{self.kernels}:{before}" if before else str(self.kernels)}

    def command(self, port: int, threads: int) -> list[str]:
        """Use as many threads for prompts as for answers, no second cache of prompts, and no
        page."""
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
    arguments = ["serve", str(folder), "--kv-backend", "posix", "--served-model-name", "bench"]
    arguments += ["--threads", str(threads), "--log-level", "warning"]
    return Program(OURS, "quire", tuple(arguments), "bench")


def mlx_lm_server(folder: Path, concurrency: int) -> Program:
    """Return mlx-lm's server on a float32 model, the only ones that it multiplies fast. It may
    batch as many requests as there are streams, in both phases."""
    arguments = ["--model", str(folder), "--log-level", "WARNING"]
    arguments += ["--decode-concurrency", str(concurrency)]
    arguments += ["--prompt-concurrency", str(concurrency)]
    return Program(
        "mlx_lm.server", "mlx_lm.server", tuple(arguments), "default_model", proves_products=True
    )


def named(text: str) -> tuple[str, str]:
    """Split NAME=REST. Raises ValueError."""
    label, equals, rest = text.partition("=")
    if not label or not equals or not rest:
        raise ValueError(f"{text!r} is not NAME=...")
    return label, rest


ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0  # a model may have to be read from a disk
STOP_TIMEOUT_S = 30.0
REPLY_TIMEOUT_S = 60.0
POLL_S = 0.1
LOG_LINES = 15


class BrokenError(Exception):
    """The benchmark cannot give figures: a server died, a request failed, answers differ."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A server that runs already, at an OpenAI base URL."""

    label: str
    target: Target
    has_our_model: bool = False

    @classmethod
    def at(cls, label: str, url: str) -> "Remote":
        """url: with or without its /v1. Raises BrokenError where nothing answers."""
        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        asked = Target.of(base, "")
        model = find_model(label, asked)
        return cls(label, Target(asked.host, asked.port, asked.path, model))

    @classmethod
    def parse(cls, text: str) -> tuple[str, str]:
        """Parse NAME=URL. Raises ValueError."""
        label, url = named(text)
        Target.of(url, "")
        return label, url

    def check(self) -> None:
        find_model(self.label, self.target)


class Server:
    """A running program; a context manager, so that it ends whatever happens."""

    def __init__(self, program: Startable, threads: int) -> None:
        self.program = program
        self.label = program.label
        self.has_our_model = program.has_our_model
        self._held = HeldPort()
        self.port = self._held.number
        self.target = Target.of(f"http://{HOST}:{self.port}/v1", program.model or "")
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop()
        self._process = subprocess.Popen(
            program.command(self.port, threads),
            cwd=ROOT,
            env=_environment(program, threads),
            stdin=subprocess.PIPE,  # its end tells the child that we are gone
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "Server":
        try:
            self._wait_until_healthy()
            if self.program.model is None:
                self.target = replace(self.target, model=find_model(self.label, self.target))
        except BaseException:
            self._end()
            self._log.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.check()
                if self.program.proves_products:
                    self._check_products()
        finally:
            self._end()
            self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise BrokenError when the server has ended by itself."""
        code = self._process.poll()
        if code is not None:
            raise BrokenError(f"{self.program.label} ended with code {code}:\n{self.log_tail()}")

    def log(self) -> str:
        # The child shares this file's position: only reading at an offset leaves it where it is.
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_LINES:])

    def _wait_until_healthy(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _healthy(self.port):
            self.check()
            if time.monotonic() > deadline_s:
                raise BrokenError(
                    f"{self.program.label} did not start within {START_TIMEOUT_S:.0f} s:\n"
                    f"{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_TIMEOUT_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._held.close()

    def _check_products(self) -> None:
        """Raise BrokenError where mlx-lm multiplied without the fast BLAS: the comparison would say
        nothing."""
        if sys.platform != "linux":
            return
        assert self._process.stdin is not None
        self._process.stdin.write(b"?")
        self._process.stdin.flush()
        deadline_s = time.monotonic() + REPLY_TIMEOUT_S
        while (found := re.search(rf"{PRODUCTS} (\d+)", self.log())) is None:
            self.check()
            if time.monotonic() > deadline_s:
                raise BrokenError(f"{self.program.label} does not say how it multiplies")
            time.sleep(POLL_S)
        if int(found[1]) == 0:
            raise BrokenError(f"{self.program.label} does not multiply with the fast BLAS")


Contestant = Server | Remote


def fast_blas(threads: int) -> dict[str, str]:
    """Return the variables of a process whose MLX multiplies float32 by OpenBLAS: the BLAS of MLX's
    Linux wheel reaches a few GFLOP/s, and mlx-lm is compared at its best. Raises CompilerError."""
    if sys.platform != "linux":
        return {}
    import scipy_openblas32 as openblas

    folder = openblas.get_lib_dir()
    library = compiled(
        Path(__file__).parent / "openblas",
        [
            "-fopenmp",
            f"-I{openblas.get_include_dir()}",
            f"-L{folder}",
            f"-l{openblas.get_library()}",
            f"-Wl,-rpath,{folder}",
        ],
    )
    return {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": str(threads)}


def _environment(program: Startable, threads: int) -> dict[str, str]:
    """Return a program's variables. A program that must prove its products gets the fast BLAS."""
    ours = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    fast = fast_blas(threads) if program.proves_products else {}
    own = dict(program.variables) if isinstance(program, LlamaServer) else {}
    return ours | {"HF_HUB_OFFLINE": "1"} | fast | own


def _healthy(port: int) -> bool:
    """Return whether a server answers, and has loaded its model. Not all have a page for that."""
    status = _get(HOST, port, "/health")[0]
    return (_get(HOST, port, "/v1/models")[0] if status == 404 else status) == 200


def find_model(label: str, target: Target) -> str:
    """Return the name of the first model that a server offers. Raises BrokenError."""
    status, body = _get(target.host, target.port, f"{target.path}/models")
    if status != 200:
        raise BrokenError(f"{label}: no list of models: {status or 'no answer'}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise BrokenError(f"{label}: its list of models is none") from error


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Return status, 0 when nothing answers, and body."""
    connection = HTTPConnection(host, port, timeout=REPLY_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Contest:
    """The servers of a comparison: quire, mlx-lm's server, and the peers that are named."""

    threads: int
    seeds: Iterator[int]
    """Seeds of prompts: no two loads share one, not even on servers that outlive the run."""
    ours_url: str | None = None
    """The URL of a quire that runs already; otherwise the benchmark starts one."""
    peers: tuple[tuple[str, str], ...] = ()
    """Names and URLs of servers that run already."""
    commands: tuple[Command, ...] = ()

    @contextmanager
    def servers(self, ours: Program, mlx_lm: Program) -> Iterator[list[Contestant]]:
        """Start all servers at once and yield them, ours first; at the end, end those that were
        started here."""
        with ExitStack() as stack:

            def start(program: Startable) -> Contestant:
                return stack.enter_context(Server(program, self.threads))

            own = Remote.at(OURS, self.ours_url) if self.ours_url is not None else start(ours)
            started = [start(mlx_lm), *(start(command) for command in self.commands)]
            yield [own, *started, *(Remote.at(label, url) for label, url in self.peers)]
