"""Servers as child processes on free loopback ports: quire, and what it is compared with."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.bench.launch import PRODUCTS
from tests.bench.load import Target

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
REPLY_TIMEOUT_S = 10.0
POLL_S = 0.1
LOG_LINES = 15


class BrokenError(Exception):
    """The benchmark cannot give figures: a server died, a request failed, answers differ."""


@dataclass(frozen=True, slots=True)
class Program:
    """A server to start."""

    label: str
    name: str
    """As tests.bench.launch knows it."""
    arguments: tuple[str, ...]
    model: str
    """What the server calls its model."""


def quire(folder: Path, threads: int, substrate: str = "posix") -> Program:
    """Our own server, with its defaults."""
    arguments = ["serve", str(folder), "--substrate", substrate, "--served-model-name", "bench"]
    arguments += ["--threads", str(threads)]
    label = "quire" if substrate == "posix" else f"quire {substrate}"
    return Program(label, "quire", (*arguments, "--log-level", "warning"), "bench")


def mlx_lm_server(folder: Path, concurrency: int) -> Program:
    """mlx-lm's server: it may batch as many requests as there are streams, in both phases."""
    arguments = ["--model", str(folder), "--log-level", "WARNING"]
    arguments += ["--decode-concurrency", str(concurrency)]
    arguments += ["--prompt-concurrency", str(concurrency)]
    return Program("mlx_lm.server", "mlx_lm.server", tuple(arguments), "default_model")


class Server:
    """A running program; a context manager, so that it ends whatever happens."""

    def __init__(self, program: Program, threads: int) -> None:
        self.program = program
        self.port = _free_port()
        self.target = Target.of(f"http://{HOST}:{self.port}/v1", program.model)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop()
        command = [sys.executable, "-m", "tests.bench.launch", program.name, str(threads)]
        command += [*program.arguments, "--host", HOST, "--port", str(self.port)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,  # its end tells the child that we are gone
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "Server":
        try:
            self._wait_until_healthy()
        except BaseException:
            self._end()
            self._log.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.check()
                self._check_products()
        finally:
            self._end()
            self._log.close()

    def check(self) -> None:
        """Raises BrokenError when the server has ended by itself."""
        code = self._process.poll()
        if code is not None:
            raise BrokenError(f"{self.program.label} ended with code {code}:\n{self.log_tail()}")

    def log(self) -> str:
        """All that the server wrote."""
        # The child shares this file's position: only reading at an offset leaves it where it is.
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def log_tail(self) -> str:
        """The last lines that the server wrote."""
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
        """Asks, waits, then insists."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_TIMEOUT_S)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _check_products(self) -> None:
        """A comparison where one side multiplies with another BLAS would say nothing."""
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _healthy(port: int) -> bool:
    connection = HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
