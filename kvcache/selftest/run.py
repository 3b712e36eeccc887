"""Runs self-tests in processes of their own, and records which tests have passed. Imports neither
the native extension nor MLX, which may fail to load."""

import json
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvcache.backends.choice import KVBackend
from kvcache.child import run
from kvcache.layout import KVFormat, KVShape, KVSpec
from kvcache.selftest.machine import this_machine
from kvcache.user_folders import cache_folder

# The time limit of a whole self-test, including the first compilation of kernels.
LIMIT_S = 120.0
STRESS_LIMIT_S = 600.0
# The child process writes this and a check's name to standard error before each check. After a
# crash, the last such line names the check that crashed.
BEGINS = "self-test begins: "


class SelfTest(StrEnum):
    """The names of self-tests, used in arguments of child processes and files on passed tests."""

    KV_BACKEND = "kv_backend"
    """Tests mappings, matrix products, and a cache of the real size."""
    KERNELS = "kernels"
    RELEASE = "release test"
    """Tests the release of heaps while other heaps are in use."""
    STRESS = "stress test"
    """Tests mappings that change while commands run."""
    PACE = "pace"
    """Measures the speed of the device, also after a pause."""
    BANDWIDTH = "bandwidth"
    """Measures how fast decode attention reads K and V."""
    EQUAL_BITS = "equal bits"
    """Compares rows of products with the same rows multiplied alone."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check. The check sets text and figures, ``run_checks`` the other fields."""

    text: str
    figures: dict[str, int | float] = field(default_factory=dict)
    """Measured numbers by name. The unit is bytes unless the name says otherwise."""
    name: str = ""
    passed: bool = True
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the result with the field names of ``quire doctor --json``."""
        numbers = {"seconds": self.seconds, "figures": self.figures}
        return {"name": self.name, "passed": self.passed, "said": self.text, **numbers}


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """The results of a self-test's checks, in order, up to the first check that failed."""

    results: tuple[Result, ...]
    fault: str
    """Half a sentence about the failure, or "" if all checks passed."""
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.fault

    def as_json(self) -> dict[str, Any]:
        steps = [result.as_json() for result in self.results]
        ending = {"fault": self.fault, "seconds": self.seconds}
        return {"passed": self.passed, "steps": steps, **ending}


def to_line(results: Iterable[Result]) -> str:
    return json.dumps([asdict(result) for result in results])


def from_line(line: str) -> tuple[Result, ...]:
    """Read a line that ``to_line`` wrote. Raises ValueError for any other line."""
    try:
        results = tuple(Result(**result) for result in json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError(f"not a report: {line[:200]!r}") from error
    if not results:
        raise ValueError("a report of nothing")
    return results


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a cache, for a model whose layers all have the same shape."""

    num_layers: int
    spec: KVSpec
    max_tokens: int
    """The most tokens of one sequence."""
    heap_bytes: int
    buffers: int
    """The number of address ranges, one per sequence."""

    def to_argument(self) -> str:
        return json.dumps(asdict(self), default=lambda number_format: number_format.value)

    @classmethod
    def from_argument(cls, argument: str) -> "CacheSize":
        fields = json.loads(argument)
        spec = fields["spec"]
        return cls(**fields | {"spec": KVSpec(**spec | {"format": KVFormat(spec["format"])})})

    @property
    def shape(self) -> KVShape:
        return KVShape.uniform(self.num_layers, self.spec)


# The size if no model is given: Qwen3-4B with its whole context, 5.6 GiB of addresses per buffer.
# Every GPU has addresses for 22 of them (kvcache/budget.py).
USUAL = CacheSize(36, KVSpec(8, 128), max_tokens=40960, heap_bytes=64 << 20, buffers=22)


def run_selftest(
    test: SelfTest,
    kv_backend: KVBackend,
    page_bytes: int | None = None,
    size: CacheSize | None = None,
    *,
    limit_s: float = LIMIT_S,
) -> SelfTestReport:
    """Run a self-test in a process of its own. ``page_bytes`` is None for the default. If ``size``
    is given, the test also makes a cache of this size."""
    command = [sys.executable, "-P", "-m", "kvcache.selftest", test, kv_backend.name]
    arguments = [str(page_bytes or ""), *([size.to_argument()] if size else [])]
    return run_program([*command, *arguments], limit_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child process ended."""

    fault: str
    """Half a sentence about the failure, or "" if the process ended with exit code 0."""
    last_line: str
    seconds: float


def run_program(command: Sequence[str], limit_s: float) -> SelfTestReport:
    """Run a program that ends with a line of results, and return the results as a report."""
    outcome = run_child(command, limit_s)
    if outcome.fault:
        return SelfTestReport((), outcome.fault, outcome.seconds)
    try:
        results = from_line(outcome.last_line)
    except ValueError as error:
        return SelfTestReport((), f"it said what cannot be read: {error}", outcome.seconds)
    failed = (f"{result.name}: {result.text}" for result in results if not result.passed)
    return SelfTestReport(results, next(failed, ""), outcome.seconds)


def run_child(command: Sequence[str], limit_s: float) -> Outcome:
    """Run a program that may crash, hang, or write any output."""
    started = time.monotonic()
    code, output, complaints = run(command, limit_s)
    seconds = time.monotonic() - started
    last_line = output[-1] if output else ""
    begun = [line.removeprefix(BEGINS) for line in complaints if line.startswith(BEGINS)]
    others = [line for line in complaints if not line.startswith(BEGINS)]
    where = f", in the step {begun[-1]!r}" if begun else ""
    if code is None:
        return Outcome(f"it took over {limit_s:.0f} s{where}", last_line, seconds)
    if code < 0:
        ended = f"it was ended by signal {-code} ({signal.strsignal(-code)})"
        return Outcome(ended + where, last_line, seconds)
    if code:
        last_words = others[-1][:300] if others else "it said nothing"
        return Outcome(f"it ended with exit code {code}{where}: {last_words}", last_line, seconds)
    return Outcome("", last_line, seconds)


# --- stamps: files in the user's cache folder about tests that a GPU has passed -------------------


def has_passed(test: SelfTest, kv_backend: KVBackend) -> bool:
    """Return True if the test has passed on this machine with the current system and MLX."""
    try:
        stamp = json.loads(_stamp_path(test, kv_backend).read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp == _stamp(test, kv_backend))


def write_stamp(test: SelfTest, kv_backend: KVBackend) -> Path:
    """Write the file that records that the test has passed. Return its path. Raises OSError."""
    path = _stamp_path(test, kv_backend)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_stamp(test, kv_backend), indent=2) + "\n")
    return path


def withdraw_stamp(test: SelfTest, kv_backend: KVBackend) -> None:
    """Remove the file that records that the test has passed. Raises OSError."""
    _stamp_path(test, kv_backend).unlink(missing_ok=True)


def _stamp_path(test: SelfTest, kv_backend: KVBackend) -> Path:
    key = sha256(json.dumps(_stamp(test, kv_backend), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{test.replace(' ', '-')}-{key[:16]}.json"


def _stamp(test: SelfTest, kv_backend: KVBackend) -> dict[str, str]:
    return {"passed": str(test), "kv_backend": str(kv_backend), **this_machine().as_json()}
