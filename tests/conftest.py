"""Fixtures that several folders share."""

import gc
import inspect
import itertools
import logging
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

from tests.models import write_model

# One run is like another, however busy the machine.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")
# A Mac's default is its GPU. Tests compute on the CPU, unless they say otherwise.
mx.set_default_device(mx.Device(mx.cpu))

# Signs in the text of tests that need Linux, and the reasons.
ONLY_LINUX = {
    r"committed_bytes\b": "only Linux charges shared memory by the page",
    r"sched_[gs]etaffinity": "only Linux says on which processors a process may run",
    r"[\"']/proc|memfd_create": "only Linux has /proc and memfd",
    r"RLIMIT_(DATA|FSIZE)": "only Linux holds a process to that limit",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need Linux on other systems, with the reason."""
    for item in items if sys.platform != "linux" else ():
        text = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
        for sign, reason in ONLY_LINUX.items():
            if re.search(sign, text):
                item.add_marker(pytest.mark.skip(reason=reason))


ENGINE_THREADS = {"engine", "monitor"}
# Longest time, in seconds, that a thread may take to end after its test.
LONGEST_END_S = 5.0
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def own_numbers_and_level() -> Iterator[None]:
    """Give each test the same random numbers of MLX, and its own level of the log."""
    mx.random.seed(0)
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Fail a test that leaves a thread of an engine behind: a later test would meet its log."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name in ENGINE_THREADS:
            thread.join(LONGEST_END_S)
            assert not thread.is_alive(), f"the thread {thread.name} goes on after its test"


@pytest.fixture(autouse=True)
def own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each test folders of its own for caches, settings and secrets. They are made when
    needed."""
    unused = tmp_path_factory.getbasetemp() / f"caches-{next(NUMBERS)}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(unused))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(unused / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(unused / "state"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of two small layers."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: a later test may hang, and then nothing else does."""
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext[-2000:]}", file=sys.stderr, flush=True)


def pytest_collection_finish() -> None:
    """Freeze what was collected: the garbage collector need not look at thousands of tests
    again."""
    gc.collect()
    gc.freeze()
