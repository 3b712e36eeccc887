"""Answers the open questions about a machine within an hour (``quire doctor --first-hour``).

The answers go into one file, for others to read. The file is written before and after each
question, so that it tells at which one a machine went down. It has no private data."""

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.selftest import MachineReport, SelfTestOptions, check_kv_backend, check_machine
from kvcache.fault_memory import write_through
from kvcache.kv_backends import ON_METAL, KVBackend
from kvcache.selftest.machine import this_machine
from kvcache.selftest.run import (
    LIMIT_S,
    STRESS_LIMIT_S,
    Result,
    SelfTest,
    SelfTestReport,
    run_child,
    run_selftest,
)

SCHEMA = 1
# The time for all questions: an hour, less what the last child processes may take to end.
FIRST_HOUR_S = 3540.0
# The most that ``quire doctor`` takes: 2 tests of 4 backends, and the device's pace.
DOCTOR_LIMIT_S = 10 * LIMIT_S
SPEED_LIMIT_S = 300.0
ENDED = "quire or the machine ended while this was measured"

ALL = (*ON_METAL, KVBackend.POSIX)
MAPPED = (KVBackend.SPARSE, KVBackend.PAGED, KVBackend.POSIX)
# MLX alone computes products: on the GPU if the paged backend works, and on the CPU.
DEVICES = (KVBackend.PAGED, KVBackend.POSIX)
# Self-tests, their backends, the questions, and how they are measured. The last two tests have
# crashed some Macs.
TESTS = (
    (SelfTest.EQUAL_BITS, DEVICES, "Do 2 to 9 rows together equal rows alone?", "MLX's products"),
    (SelfTest.BANDWIDTH, ALL, "How fast does attention read K and V?", "1 and 3 x 16384 tokens"),
    (SelfTest.FIRST_USE, ALL, "How long does a kernel's first use take?", "each check twice"),
    (SelfTest.RANGES, MAPPED, "How many address ranges fit?", "128 of 5.6 GiB at most"),
    (SelfTest.RELEASE, MAPPED, "Does a heap's memory go back?", "`quire doctor --release-test`"),
    (SelfTest.STRESS, MAPPED, "May mappings change under commands?", "`quire doctor --stress`"),
)
# These tests follow two others in the same measurement.
LIMITS_S = {SelfTest.RELEASE: 3 * LIMIT_S, SelfTest.STRESS: 2 * LIMIT_S + STRESS_LIMIT_S}

# A row's id, the question, how it is measured, the time limit in seconds, and the measurement.
Question = tuple[str, str, str, float, Callable[[], SelfTestReport]]


@dataclass(slots=True)
class FirstHour:
    """Measures this machine, and writes the file."""

    config: EngineConfig
    path: Path
    bench: Sequence[str]
    """A command that measures the model whose name follows, and prints a JSON object in a line."""
    models: Sequence[str]
    report: MachineReport | None = None
    """The report of ``quire doctor``, once that question has an answer."""
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _end: float = field(default_factory=lambda: time.monotonic() + FIRST_HOUR_S)

    def answers(self, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Measure, and yield a row for each question. ``progress`` is called with the ids of
        questions. Raises OSError if the file cannot be written."""
        for name, question, method, limit_s, measure in self._questions():
            progress(name)
            row = {"id": name, "question": question, "method": method}
            self._rows.append(row | {"fault": ENDED})
            self._write()
            started = time.monotonic()
            left_s = self._end - started
            report = _nothing(f"skipped: it may take {limit_s:.0f} s, and {left_s:.0f} s are left")
            if left_s >= limit_s:
                try:
                    report = measure()
                except Exception as error:
                    report = _nothing(f"{type(error).__name__}: {error}")
            answer = report.as_json() | {"seconds": time.monotonic() - started}
            self._rows[-1] = self._published(row | answer)
            self._write()
            yield self._rows[-1]

    def _questions(self) -> Iterator[Question]:
        which = "Which backends work, and which would serve?"
        yield "doctor", which, "`quire doctor`", DOCTOR_LIMIT_S, self._examine
        how_fast = "How fast is a model at 1, 4 and 8 streams, and how much memory does it take?"
        for name in self.models:
            row = f"speed of {name}", how_fast, "`quire bench`"
            yield *row, SPEED_LIMIT_S, partial(self._measure_speed, name)
        for test, kv_backends, question, method in TESTS:
            for kv_backend in kv_backends:
                measure = partial(self._test, test, kv_backend)
                limit_s = LIMITS_S.get(test, LIMIT_S)
                yield f"{test}, {kv_backend.setting}", question, method, limit_s, measure

    def _examine(self) -> SelfTestReport:
        self.report = check_machine(SelfTestOptions(self.config), lambda _: None)
        choice = Result("; ".join(self.report.reasons), name="choice")
        return SelfTestReport((choice,), "" if self.report.serves else "nothing can serve", 0.0)

    def _measure_speed(self, name: str) -> SelfTestReport:
        outcome = run_child([*self.bench, name], SPEED_LIMIT_S)
        if outcome.fault:
            return _nothing(outcome.fault)
        figures = json.loads(outcome.last_line)
        rates = [f"{rate:.1f} at {n}" for n, rate in figures["decode_tokens_per_s"].items()]
        speeds = Result(f"{', '.join(rates)} streams (tokens/s)", figures, name)
        return SelfTestReport((speeds,), "", 0.0)

    def _test(self, test: SelfTest, kv_backend: KVBackend) -> SelfTestReport:
        if self.report is None:
            return _nothing("`quire doctor` has not told which backends work")
        if fault := self.report.of(kv_backend).fault:
            return _nothing(f"{kv_backend} does not work here: {fault}")
        if test not in LIMITS_S:
            return run_selftest(test, kv_backend)
        stress = test is SelfTest.STRESS
        options = SelfTestOptions(self.config, release_test=not stress, stress=stress)
        report = check_kv_backend(kv_backend, "", options, lambda _: None)
        return report.tests.get(test) or _nothing(report.fault)

    def _write(self) -> None:
        """Write the file in a way that survives a crash of the machine."""
        report = {
            "schema": SCHEMA,
            "quire": version("quire"),
            "machine": this_machine().as_json(),
            "limit_s": FIRST_HOUR_S,
            "doctor": self.report and self.report.as_json(),
            "rows": self._rows,
        }
        new = self.path.with_suffix(".new")
        with new.open("w", encoding="utf-8") as file:
            json.dump(self._published(report), file, indent=1)
            file.flush()
            write_through(file.fileno())
        new.replace(self.path)

    def _published(self, value: Any) -> Any:
        return without(private_data(self.models), value)


def _nothing(why: str) -> SelfTestReport:
    return SelfTestReport((), why, 0.0)


# --- private data -----------------------------------------------------------------------------


def private_data(models: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of UUIDs, paths, and names of the user, the host and folders of models."""
    home, host = os.path.expanduser("~"), platform.node()
    names = {home, Path(home).name, os.environ.get("USER", ""), host, host.partition(".")[0]}
    for folder in filter(os.path.exists, models):
        names |= {folder, Path(folder).name}
    words = "|".join(re.escape(name) for name in sorted(names - {""}, key=len, reverse=True))
    return re.compile(
        rf"(?:{re.escape(home)}|~)/[^:;,'\")\n]*"  # may have spaces
        r"|(?<![\w.])/[\w.@+-]+/[^\s:;,'\")]*"
        r"|\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"
        rf"|(?<!\w)(?:{words})(?!\w)",
        re.IGNORECASE,
    )


def without(private: re.Pattern[str], value: Any) -> Any:
    """Return a JSON value without the matches of ``private`` in its texts."""
    match value:
        case dict():
            return {key: without(private, item) for key, item in value.items()}
        case list():
            return [without(private, item) for item in value]
        case str():
            return private.sub("<private>", value)
        case _:
            return value
