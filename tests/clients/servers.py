"""Servers for the clients: child processes on free ports of the loopback address."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.clients.environments import ROOT
from tests.clients.models import random_model
from tests.models import write_embedding_model

QUIRE = str(Path(sys.executable).with_name("quire"))
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
END_TIMEOUT_S = 300.0
POLL_S = 0.05
ANNOUNCED = re.compile(r"serving .+? on (http://\S+:\d+)")


class ServerError(Exception):
    """A server did not start, or ended by itself; with its log."""


def run_to_end(*command: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """A program that ends by itself, and what it wrote."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=END_TIMEOUT_S, check=False, **how
    )


class Process:
    """A program that says where it serves, from when it has said so. Its log is a file without a
    name."""

    def __init__(self, *command: str | Path) -> None:
        """Raises ServerError where it does not start."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by kill()
        self._said = ""
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (found := ANNOUNCED.search(self.text)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise ServerError(f"it did not start ({self.process.returncode}):\n{self.text}")
            time.sleep(POLL_S)
        self.url = found[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def text(self) -> str:
        """The log so far."""
        if not self._log.closed:
            # The child shares the file's position: only reading at an offset leaves it there.
            size = os.fstat(self._log.fileno()).st_size
            self._said = os.pread(self._log.fileno(), size, 0).decode(errors="replace")
        return self._said

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code, when it has ended by itself; it is gone afterwards in any case."""
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        _ = self.text
        self._log.close()


@contextmanager
def serving(*command: str | Path) -> Iterator[Process]:
    """A program that says where it serves, until the block ends.

    Raises ServerError where the program does not start, or has ended before the block did.
    """
    process = Process(*command)
    try:
        yield process
        if process.process.poll() is not None:
            raise ServerError(f"it ended with {process.process.returncode}:\n{process.text}")
    finally:
        process.send(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait()


@contextmanager
def random_server(*, several: bool = False) -> Iterator[str]:
    """``quire serve`` with random weights; several: and with a second model."""
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "random")
        limits = ("--kv-budget", "256MiB", "--max-model-len", "8192", "--max-num-seqs", "8")
        command = (QUIRE, "serve", *_models(model, several=several), "--port", "0", *limits)
        with serving(*command) as process:
            yield process.url


@contextmanager
def embedding_server(*, several: bool = False) -> Iterator[str]:
    """``quire serve`` with random weights that make vectors; several: and with a second model."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_embedding_model(Path(folder) / "embedder")
        limits = ("--kv-budget", "64MiB", "--max-model-len", "1024")
        command = (QUIRE, "serve", *_models(model, several=several), "--port", "0", *limits)
        with serving(*command) as process:
            yield process.url


def _models(model: Path, *, several: bool) -> list[str]:
    """Arguments for a model alone, or beside another one; then who names none means it, too."""
    if not several:
        return [str(model)]
    settings = model.parent / "settings.toml"
    settings.write_text(f'[models]\npinned = ["{model.name}"]\naliases = {{}}\n')
    return [str(model), "demo", "--config", str(settings)]


@contextmanager
def parrot_server(*, several: bool = False) -> Iterator[str]:
    """The model that says what it is told; several: behind the front of several models."""
    module = "tests.clients.several" if several else "tests.clients.parrot"
    with serving(sys.executable, "-m", module) as process:
        yield process.url
