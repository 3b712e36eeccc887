"""Answers the open questions about a machine within an hour (``quire doctor --first-hour``).

The answers go into one file without private data, for others to read. It has a JSON object in each
line: first one about the machine, then two for each question, when it begins and when it has an
answer. Lines are only added, so that a crash of the machine loses no more than its own answer."""

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.selftest import MachineReport, SelfTestOptions, check_kv_backend, check_machine
from kvcache.backends.choice import KVBackend
from kvcache.backends.faults import write_through
from kvcache.selftest.machine import Machine, this_machine
from kvcache.selftest.run import (
    LIMIT_S,
    STRESS_LIMIT_S,
    USUAL,
    Result,
    SelfTest,
    SelfTestReport,
    run_child,
    run_selftest,
)

# The time for all questions: an hour, less what the last child processes may take to end.
FIRST_HOUR_S = 3540.0
# The most that ``quire doctor`` takes: 2 tests of 4 backends, the device's pace, and the extension.
DOCTOR_LIMIT_S = 10 * LIMIT_S
SPEED_LIMIT_S = 300.0
# More address ranges than the 39 bits of an M1 hold.
MANY = replace(USUAL, buffers=128)

MAPPED = (KVBackend.SPARSE, KVBackend.PAGED, KVBackend.POSIX)
# Self-tests, their backends, time limits and questions. The last two tests run after two others.
# They are last because they have crashed some Macs.
TESTS = (
    (SelfTest.EQUAL_BITS, MAPPED, LIMIT_S, "Do 2 to 9 rows together equal rows alone?"),
    (SelfTest.BANDWIDTH, tuple(KVBackend), LIMIT_S, "How fast does attention read K and V?"),
    (SelfTest.KV_BACKEND, MAPPED, LIMIT_S, "How many address ranges of 5.6 GiB fit?"),
    (SelfTest.RELEASE, MAPPED, 3 * LIMIT_S, "Does a heap's memory go back?"),
    (SelfTest.STRESS, MAPPED, 2 * LIMIT_S + STRESS_LIMIT_S, "May mappings change under commands?"),
)
HOW_FAST = "How fast is a model at 1, 4 and 8 streams, and how much memory does it take?"


@dataclass(slots=True)
class FirstHour:
    """Measures this machine, and writes the file."""

    config: EngineConfig
    path: Path
    bench: Sequence[str]
    """A command that measures the model whose name follows, and prints a JSON object in a line."""
    models: Sequence[str]
    report: MachineReport | None = None
    _machine: Machine = field(default_factory=this_machine)
    _end: float = field(default_factory=lambda: time.monotonic() + FIRST_HOUR_S)

    def answers(self, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Measure, and yield the answer of each question. ``progress`` is called with the ids of
        questions. Raises OSError if the file cannot be written."""
        self._write(quire=version("quire"), machine=self._machine.as_json())
        for name, question, limit_s, measure in self._questions():
            progress(name)
            self._write(begins=name)
            started = time.monotonic()
            left_s = self._end - started
            report = _nothing(f"skipped, as {left_s:.0f} s are left")
            try:
                if left_s >= limit_s:
                    report = measure()
            except Exception as error:
                report = _nothing(f"{type(error).__name__}: {error}")
            seconds = {"seconds": time.monotonic() - started}
            answer = {"id": name, "question": question, **report.as_json(), **seconds}
            self._write(**answer)
            yield answer

    def _questions(self) -> Iterator[tuple[str, str, float, Callable[[], SelfTestReport]]]:
        """Yield the id of each question, its text, a time limit in seconds and the measurement."""
        which = "Which backends work, and which would serve?"
        yield "doctor", which, DOCTOR_LIMIT_S, self._examine
        for name in self.models:
            yield f"speed of {name}", HOW_FAST, SPEED_LIMIT_S, partial(self._measure_speed, name)
        for test, kv_backends, limit_s, question in TESTS:
            for kv_backend in kv_backends:
                measure = partial(self._test, test, kv_backend)
                yield f"{test}, {kv_backend.setting}", question, limit_s, measure

    def _examine(self) -> SelfTestReport:
        self.report = check_machine(SelfTestOptions(self.config), lambda _: None)
        choice = Result("; ".join(self.report.reasons), self.report.as_json(), "choice")
        return SelfTestReport((choice,), "" if self.report.serves else "nothing can serve", 0.0)

    def _measure_speed(self, name: str) -> SelfTestReport:
        outcome = run_child([*self.bench, name], SPEED_LIMIT_S)
        if outcome.fault:
            return _nothing(outcome.fault)
        figures = json.loads(outcome.last_line)
        return SelfTestReport((Result(figures.pop("line"), figures, name),), "", 0.0)

    def _test(self, test: SelfTest, kv_backend: KVBackend) -> SelfTestReport:
        if self.report is None:
            return _nothing("`quire doctor` has not told which backends work")
        if fault := self.report.of(kv_backend).fault:
            return _nothing(f"{kv_backend} does not work here: {fault}")
        release_test, stress = test is SelfTest.RELEASE, test is SelfTest.STRESS
        if not (release_test or stress):
            return run_selftest(test, kv_backend, size=MANY)
        options = SelfTestOptions(self.config, release_test=release_test, stress=stress)
        report = check_kv_backend(kv_backend, "", options, lambda _: None)
        return report.tests.get(test) or _nothing(report.fault)

    def _write(self, **line: Any) -> None:
        """Add a line that survives a crash of the machine right afterwards."""
        private = private_data(self.models, self._machine)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(without(private, line)) + "\n")
            file.flush()
            write_through(file.fileno())


def _nothing(why: str) -> SelfTestReport:
    return SelfTestReport((), why, 0.0)


# --- private data -----------------------------------------------------------------------------


def private_data(models: Sequence[str], machine: Machine) -> re.Pattern[str]:
    """Return a pattern of UUIDs, paths, and names of the user, the host and folders of models. A
    path ends at a colon or semicolon, as it may have spaces. A word of the machine's names, such as
    "Max", is not private."""
    host, public = platform.node(), " ".join(machine.as_json().values()).lower().split()
    names = {Path.home().name, os.environ.get("USER", ""), host, host.partition(".")[0]}
    for folder in filter(os.path.exists, models):
        names |= {folder.strip("./"), Path(folder).resolve().name}
    names = {name for name in names if len(name) > 2 and name.lower() not in public}
    words = [rf"(?<!\w){re.escape(name)}(?!\w)" for name in sorted(names, key=len, reverse=True)]
    uuid = r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"
    return re.compile("|".join([r"(?<!\w)/[\w.][^:;\n]*", uuid, *words]), re.IGNORECASE)


def without(private: re.Pattern[str], value: Any) -> Any:
    match value:
        case str():
            return private.sub("<private>", value)
        case dict():
            return {key: without(private, item) for key, item in value.items()}
        case list():
            return [without(private, item) for item in value]
    return value
