"""The side of a trial that must survive it: starts the process, and makes a report of its end.

Nothing here imports the native extension or MLX: what is tried may be unable to load them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from tempfile import TemporaryFile

from kvcache.canary.report import TrialReport, fault_of, from_line
from kvcache.layout import KVFormat, KVShape, KVSpec
from kvcache.substrates import Substrate

# What can be tried: a substrate's pages, the arithmetic of its kernels, the release of its heaps,
# mappings that change while commands run, and how fast the device is when.
SUBSTRATE, KERNELS, RELEASE, STRESS, PACE = "substrate", "kernels", "release", "stress", "pace"
# Of a whole trial; compiling the kernels for the first time included.
LIMIT_S = 120.0
STRESS_LIMIT_S = 600.0
# A process that hangs in the driver does not even end when it is killed.
LAST_WORDS_S = 5.0
BEGINS = "canary begins: "


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What the cache of a model's layers of one kind is made of."""

    num_layers: int
    spec: KVSpec
    max_tokens: int
    """Of one sequence."""
    heap_bytes: int
    buffers: int
    """Address ranges that there may be at once."""

    def to_argument(self) -> str:
        """For a trial's command line."""
        spec = self.spec
        numbers = asdict(self) | {"spec": [spec.kv_heads, spec.head_dim, spec.format.value]}
        return json.dumps(numbers)

    @classmethod
    def from_argument(cls, argument: str) -> "CacheSize":
        """Reads what ``to_argument`` wrote."""
        said = json.loads(argument)
        kv_heads, head_dim, name = said["spec"]
        return cls(**said | {"spec": KVSpec(kv_heads, head_dim, KVFormat(name))})

    @property
    def shape(self) -> KVShape:
        """Return the shape of these layers alone."""
        return KVShape.uniform(self.num_layers, self.spec)


# Of Qwen3-4B with all of its context, where no model is named: 5.6 GiB of addresses a buffer.
USUAL = CacheSize(36, KVSpec(8, 128), max_tokens=40960, heap_bytes=64 << 20, buffers=64)


def run_trial(
    what: str,
    substrate: Substrate,
    page_bytes: int | None = None,
    size: str = "",
    *,
    limit_s: float = LIMIT_S,
) -> TrialReport:
    """Tries a substrate of this machine in a process of its own.

    what: SUBSTRATE, KERNELS, RELEASE, STRESS or PACE. page_bytes: None for the usual one. size:
    that of a real cache (``CacheSize.to_argument``), where one is tried as well.
    """
    command = [sys.executable, "-m", "kvcache.canary", what, substrate.name]
    return run_program([*command, str(page_bytes or ""), *([size] if size else [])], limit_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended."""

    fault: str
    """"" where it ended by itself with exit code 0."""
    last_line: str
    """Of its standard output."""
    seconds: float


def run_program(command: Sequence[str], limit_s: float) -> TrialReport:
    """The report of any program that ends with ``to_line``, however it ends."""
    outcome = run_child(command, limit_s)
    if outcome.fault:
        return TrialReport((), outcome.fault, outcome.seconds)
    try:
        steps = from_line(outcome.last_line)
    except ValueError as error:
        return TrialReport((), f"it said what cannot be read: {error}", outcome.seconds)
    return TrialReport(steps, fault_of(steps), outcome.seconds)


def run_child(command: Sequence[str], limit_s: float) -> Outcome:
    """Runs a program that may crash, hang, or say anything."""
    started = time.monotonic()
    # Files and no pipes: a process that cannot be ended must not be waited for.
    with TemporaryFile() as out, TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        code = _wait(process, limit_s)
        said, complaints = _lines(out.fileno()), _lines(err.fileno())
    seconds = time.monotonic() - started
    last_line = said[-1] if said else ""
    steps = [line.removeprefix(BEGINS) for line in complaints if line.startswith(BEGINS)]
    others = [line for line in complaints if not line.startswith(BEGINS)]
    where = f", in the step {steps[-1]!r}" if steps else ""
    if code is None:
        return Outcome(f"it took over {limit_s:.0f} s{where}", last_line, seconds)
    if code < 0:
        ended = f"it was ended by signal {-code} ({signal.strsignal(-code)})"
        return Outcome(ended + where, last_line, seconds)
    if code:
        last_words = others[-1][:300] if others else "it said nothing"
        return Outcome(f"it ended with exit code {code}{where}: {last_words}", last_line, seconds)
    return Outcome("", last_line, seconds)


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
    """The process's exit code; None when it had to be killed."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
        return None


def _lines(file: int) -> list[str]:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), errors="replace") as text:
        return [line for raw in text if (line := raw.strip())]
