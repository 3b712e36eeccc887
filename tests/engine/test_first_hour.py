"""The file of `quire doctor --first-hour`: its rows, its time, and what it must not tell."""

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import first_hour
from engine.config import EngineConfig
from engine.first_hour import ENDED, FirstHour
from engine.selftest import KVBackendReport, SelfTestOptions
from kvcache.kv_backends import KVBackend
from kvcache.selftest.run import Outcome, Result, SelfTest, SelfTestReport
from tests.engine.machine_reports import FAILED, MAC, PASSED

SPEEDS = {"decode_tokens_per_s": {"1": 41.25, "8": 160.0}}
PLACES = {
    "equal bits": ("paged", "posix"),
    "bandwidth": ("sparse", "paged", "dense", "posix"),
    "first use": ("sparse", "paged", "dense", "posix"),
    "ranges": ("sparse", "paged", "posix"),
    "release test": ("sparse", "paged", "posix"),
    "stress test": ("sparse", "paged", "posix"),
}
TESTS = [f"{test}, {place}" for test, places in PLACES.items() for place in places]
IDS = ["doctor", "speed of demo", *TESTS]


class Children:
    """A Mac's answers, by the ids of rows, for the child processes of measurements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.raises: dict[str, BaseException] = {}
        self.doctor = MAC
        self.speed = Outcome("", json.dumps(SPEEDS), 60.0)
        self.report = PASSED
        answer = self._answer
        for name, function in {
            "check_machine": lambda options, _: answer("doctor", self.doctor),
            "run_child": lambda command, _: answer(f"speed of {command[-1]}", self.speed),
            "run_selftest": lambda test, where: answer(f"{test}, {where.setting}", self.report),
            "check_kv_backend": self._check,
        }.items():
            monkeypatch.setattr(first_hour, name, function)

    def _check(
        self, kv_backend: KVBackend, missing: str, options: SelfTestOptions, _: object
    ) -> Any:
        assert options.release_test != options.stress
        test = SelfTest.STRESS if options.stress else SelfTest.RELEASE
        test = SelfTest.KV_BACKEND if self.report is FAILED else test
        report = KVBackendReport(kv_backend, missing, {test: self.report})
        return self._answer(f"{test}, {kv_backend.setting}", report)

    def _answer(self, name: str, answer: Any) -> Any:
        if name in self.raises:
            raise self.raises[name]
        return answer


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hour.json"


def answers(file: Path, *models: str, **fields: Any) -> dict[str, Any]:
    hour = FirstHour(EngineConfig(), file, ["quire", "bench"], models or ["demo"], **fields)
    told: list[str] = []
    rows = {row["id"]: row for row in hour.answers(told.append)}
    assert list(rows) == told or models
    return rows


def test_every_question_is_a_row_of_the_file(children: Children, file: Path) -> None:
    rows = answers(file)
    assert list(rows) == IDS
    written = json.loads(file.read_text())
    assert written["rows"] == list(rows.values())
    assert set(written["machine"]) == {"model", "processor", "system", "mlx"}
    assert written["doctor"]["choice"]["name"] == "sparse"
    for row in rows.values():
        assert set(row) == {"id", "question", "method", "passed", "steps", "fault", "seconds"}
        assert row["steps"] or row["fault"]
    (speed,) = rows["speed of demo"]["steps"]
    assert speed["figures"] == SPEEDS
    assert speed["said"] == "41.2 at 1, 160.0 at 8 streams (tokens/s)"
    for name in ("bandwidth, sparse", "release test, posix", "stress test, sparse"):
        assert rows[name]["steps"][0]["said"] == "two blocks"
    assert rows["bandwidth, paged"]["fault"] == "paged on Metal does not work here: map: refused"
    assert "memory is not the processor's" in rows["first use, dense"]["fault"]
    assert list(file.parent.iterdir()) == [file]


MEASURED = [name for name in IDS if not name.endswith(("paged", "dense"))]


@pytest.mark.parametrize("name", MEASURED)
def test_a_measurement_loses_its_own_answer_at_most(
    children: Children, file: Path, name: str
) -> None:
    children.raises[name] = RuntimeError("no device")
    rows = answers(file)
    assert list(rows) == IDS
    assert [row["id"] for row in rows.values() if "no device" in row["fault"]] == [name]
    assert all("`quire doctor`" in rows[test]["fault"] for test in TESTS if name == "doctor")
    children.raises[name] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):  # or the machine goes down
        answers(file)
    left = json.loads(file.read_text())["rows"]
    assert [row["id"] for row in left] == IDS[: IDS.index(name) + 1]
    assert [row["id"] for row in left if row["fault"] == ENDED] == [name]


@pytest.mark.parametrize(
    ("speed", "fault"),
    [
        (Outcome("it took over 300 s", "", 300.0), "it took over 300 s"),
        (Outcome("it was ended by signal 6 (Aborted)", "", 1.0), "it was ended by signal 6"),
        (Outcome("", "", 1.0), "JSONDecodeError: "),
        (Outcome("", "{}", 1.0), "KeyError: "),
        (Outcome("", "[]", 1.0), "TypeError: "),
    ],
)
def test_a_model_that_is_not_measured_is_told_with_the_reason(
    children: Children, file: Path, speed: Outcome, fault: str
) -> None:
    children.speed = speed
    row = answers(file)["speed of demo"]
    assert row["fault"].startswith(fault)
    assert (row["passed"], row["steps"]) == (False, [])


def test_a_backend_that_fails_before_its_test_is_told(children: Children, file: Path) -> None:
    children.report = FAILED
    assert answers(file)["stress test, sparse"]["fault"] == "map: refused"


@pytest.mark.parametrize(
    ("left_s", "skipped"),
    [
        (3540.0, ()),
        (1100.0, ("doctor",)),
        (800.0, ("doctor", "stress test")),
        (350.0, ("doctor", "stress test", "release test")),
        (200.0, ("doctor", "stress test", "release test", "speed of")),
        (100.0, ("",)),
    ],
)
@pytest.mark.usefixtures("children")
def test_what_may_end_after_the_hour_is_skipped(
    file: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, skipped: tuple[str, ...]
) -> None:
    monkeypatch.setattr(first_hour, "FIRST_HOUR_S", left_s)
    rows = answers(file, report=MAC)
    assert list(rows) == IDS
    without = [name for name in IDS if rows[name]["fault"].startswith("skipped: ")]
    assert without == [name for name in IDS if name.startswith(skipped)]


SECRETS = ("ed-miller", "eds-mac", "secret", "c0ffee00-1234-4abc-8def-0123456789ab", "my models")


@pytest.mark.parametrize(
    "text",
    [
        "/Users/ed-miller/My Models/secret/model.safetensors: it was cut off",
        "it read '/Users/ed-miller/Library/Application Support/secret' twice",
        "dyld: /private/var/folders/secret/T/libmlx.dylib is not here",
        "a fault (~/Library/Caches/quire/secret-1.json)",
        "eds-mac.local did not answer, nor did Eds-Mac",
        "the owner is Ed-Miller",
        "boot C0FFEE00-1234-4abc-8def-0123456789AB of file:///opt/secret/b",
        "models/secret-7b: no config.json in secret-7b",
    ],
)
def test_the_file_has_no_private_data(
    children: Children, file: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HOME", "/Users/ed-miller")
    monkeypatch.setattr(platform, "node", lambda: "eds-mac.local")
    (file.parent / "models/secret-7b").mkdir(parents=True)
    monkeypatch.chdir(file.parent)
    children.doctor = replace(MAC, reasons=(text,), warnings=(text,))
    children.speed = Outcome(text, "", 1.0)
    children.report = SelfTestReport((Result(text, name="map"),), text, 1.0)
    rows = answers(file, "models/secret-7b", "Qwen/Qwen3-4B")
    for written in (file.read_text().lower(), str(rows).lower()):
        assert [secret for secret in SECRETS if secret in written] == []
    assert "8 streams, and how much memory" in rows["speed of Qwen/Qwen3-4B"]["question"]
