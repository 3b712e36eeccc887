"""Servers for the clients: child processes on free ports of the loopback address."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.clients.environments import ROOT
from tests.clients.models import random_model
from tests.models import write_embedding_model

QUIRE = str(Path(sys.executable).with_name("quire"))
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
END_TIMEOUT_S = 300.0
POLL_S = 0.05
Process = subprocess.Popen[bytes]
ANNOUNCED = re.compile(r"serving .+? on (http://127\.0\.0\.1:\d+)")


class ServerError(Exception):
    """A server did not start, or ended by itself; with its log."""


def run_to_end(*command: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """A program that ends by itself, and what it wrote."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=END_TIMEOUT_S, check=False, **how
    )


@contextmanager
def serving(*command: str) -> Iterator[tuple[str, Process]]:
    """A program that says where it serves, until the block ends. Gives its address and process.

    Raises ServerError where the program does not start, or has ended before the block did.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

        def written() -> str:
            log.seek(0)
            return log.read().decode(errors="replace")

        try:
            yield _address(process, written), process
            if process.poll() is not None:
                raise ServerError(f"the server ended with {process.returncode}:\n{written()}")
        finally:
            _end(process)


@contextmanager
def random_server(*, several: bool = False) -> Iterator[str]:
    """``quire serve`` with random weights; several: and with a second model."""
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "random")
        limits = ("--kv-budget", "256MiB", "--max-model-len", "8192", "--max-num-seqs", "8")
        command = (QUIRE, "serve", *_models(model, several=several), "--port", "0", *limits)
        with serving(*command) as (address, _):
            yield address


@contextmanager
def embedding_server(*, several: bool = False) -> Iterator[str]:
    """``quire serve`` with random weights that make vectors; several: and with a second model."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_embedding_model(Path(folder) / "embedder")
        limits = ("--kv-budget", "64MiB", "--max-model-len", "1024")
        command = (QUIRE, "serve", *_models(model, several=several), "--port", "0", *limits)
        with serving(*command) as (address, _):
            yield address


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
    with serving(sys.executable, "-m", module) as (address, _):
        yield address


def _address(process: Process, written: Callable[[], str]) -> str:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (found := ANNOUNCED.search(written())) is None:
        if process.poll() is not None:
            raise ServerError(f"the server ended with {process.returncode}:\n{written()}")
        if time.monotonic() > deadline_s:
            raise ServerError(f"the server did not start in {START_TIMEOUT_S:.0f} s:\n{written()}")
        time.sleep(POLL_S)
    return found[1]


def _end(process: Process) -> None:
    """Asks, waits, then insists."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)
