"""The file of `quire doctor --first-hour`: its answers, its time, and what it must not tell."""

import json
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine import first_hour
from engine.config import EngineConfig
from engine.first_hour import FirstHour, private_data, without
from engine.selftest import KVBackendReport, SelfTestOptions
from kvcache.backends.choice import KVBackend
from kvcache.selftest.run import Outcome, Result, SelfTest, SelfTestReport
from tests.engine.machine_reports import MAC

MAPPED = ("sparse", "paged", "posix")
PLACES = {
    "equal bits": MAPPED,
    "bandwidth": ("sparse", "paged", "dense", "posix"),
    "kv_backend": MAPPED,
    "release test": MAPPED,
    "stress test": MAPPED,
}
TESTS = [f"{test}, {place}" for test, places in PLACES.items() for place in places]
IDS = ["doctor", "speed of demo", *TESTS]
REFUSED = "paged on Metal does not work here: map: refused"


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mock]:
    """What a Mac answers to each function that measures. A test's result is its own name."""

    def run_selftest(test: SelfTest, kv_backend: KVBackend, **_: object) -> SelfTestReport:
        return SelfTestReport((Result(f"{test}, {kv_backend.setting}"),), "", 1.0)

    def check(kv_backend: KVBackend, missing: str, options: SelfTestOptions, _: object) -> Any:
        tests = {SelfTest.RELEASE: options.release_test, SelfTest.STRESS: options.stress}
        reports = {test: run_selftest(test, kv_backend) for test, wanted in tests.items() if wanted}
        return KVBackendReport(kv_backend, missing, reports)

    mocks = {
        "check_machine": Mock(return_value=MAC),
        "run_child": Mock(return_value=Outcome("", '{"line": "9 tokens/s", "rate": 9}', 1.0)),
        "run_selftest": Mock(side_effect=run_selftest),
        "check_kv_backend": Mock(side_effect=check),
    }
    for name, function in mocks.items():
        monkeypatch.setattr(first_hour, name, function)
    return mocks


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hour.log"


def answers(file: Path, model: str = "demo", **fields: Any) -> dict[str, Any]:
    hour = FirstHour(EngineConfig(), file, ["quire", "bench"], [model], **fields)
    return {answer["id"]: answer for answer in hour.answers(lambda _: None)}


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("mac")
def test_every_question_has_an_answer_in_the_file(file: Path) -> None:
    given = answers(file)
    first, *written = lines(file)
    assert set(first["machine"]) == {"model", "processor", "system", "mlx"}
    assert written[0::2] == [{"begins": name} for name in IDS]
    assert written[1::2] == list(given.values())
    (choice,), (speed,) = (given[name]["steps"] for name in IDS[:2])
    assert choice["figures"]["choice"]["name"] == "sparse"
    assert (speed["said"], speed["figures"]) == ("9 tokens/s", {"rate": 9})
    for name in TESTS:
        works = name.endswith(("sparse", "posix"))
        assert [step["said"] for step in given[name]["steps"]] == ([name] if works else [])
    assert given["bandwidth, paged"]["fault"] == REFUSED


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("check_machine", "doctor"),
        ("run_child", "speed of demo"),
        ("check_kv_backend", "release test, sparse"),
    ],
)
def test_a_measurement_loses_its_own_answer_at_most(
    mac: dict[str, Mock], file: Path, function: str, name: str
) -> None:
    mac[function].side_effect = RuntimeError("no device")
    given = answers(file)
    assert list(given) == IDS
    assert given[name]["fault"] == "RuntimeError: no device"
    assert all("`quire doctor`" in given[test]["fault"] for test in TESTS if name == "doctor")
    mac[function].side_effect = KeyboardInterrupt  # or the machine goes down
    file.unlink()
    with pytest.raises(KeyboardInterrupt):
        answers(file)
    assert lines(file)[-1] == {"begins": name}
    assert [line["id"] for line in lines(file)[2::2]] == IDS[: IDS.index(name)]


@pytest.mark.parametrize(
    ("speed", "fault"),
    [
        (Outcome("it took over 300 s", "", 300.0), "it took over 300 s"),
        (Outcome("", "", 1.0), "JSONDecodeError: "),
        (Outcome("", "{}", 1.0), "KeyError: "),
        (Outcome("", "7", 1.0), "AttributeError: "),
    ],
)
def test_what_is_not_measured_is_told_with_the_reason(
    mac: dict[str, Mock], file: Path, speed: Outcome, fault: str
) -> None:
    mac["run_child"].return_value = speed
    mac["check_kv_backend"].side_effect = [KVBackendReport(KVBackend.SPARSE, "it hung")] * 4
    given = answers(file)
    assert given["speed of demo"]["fault"].startswith(fault)
    assert given["stress test, sparse"]["fault"] == "it hung"


@pytest.mark.parametrize(
    ("left_s", "skipped"),
    [
        (1200, ()),
        (1199, ("doctor",)),
        (839, ("doctor", "stress test")),
        (359, ("doctor", "stress test", "release test")),
        (299, ("doctor", "stress test", "release test", "speed of")),
        (119, ("",)),
    ],
)
@pytest.mark.usefixtures("mac")
def test_what_may_end_after_the_hour_is_skipped(
    file: Path, monkeypatch: pytest.MonkeyPatch, left_s: int, skipped: tuple[str, ...]
) -> None:
    monkeypatch.setattr(first_hour, "FIRST_HOUR_S", left_s + 0.4)
    given = answers(file, report=MAC)
    without = [name for name in IDS if given[name]["fault"] == f"skipped, as {left_s} s are left"]
    assert without == [name for name in IDS if name.startswith(skipped)]


@pytest.fixture
def ed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user pro-ed of the machine eds-mac, with a model of their own."""
    monkeypatch.setenv("HOME", "/Users/pro-ed")
    monkeypatch.setattr(platform, "node", lambda: "eds-mac.secret.com")
    (tmp_path / "models/secret-7b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


FIGURES = "Apple M3 Pro: 41.2 / 160.0 tokens/s at 1 / 8 streams, 9.5 GB/s; macOS 26.4."


@pytest.mark.usefixtures("ed")
@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/Users/pro-ed/My Models/x.bin: it was cut off", "<private>: it was cut off"),
        ("it read '/Volumes/Ed's Disk/x, y' twice; 2 GB/s", "it read '<private>; 2 GB/s"),
        ("dlopen(/opt/secret/b.so, 2): no symbol", "dlopen(<private>: no symbol"),
        ("a fault (~/Library/secret.json)\nnext", "a fault (~<private>\nnext"),
        ("Eds-Mac.Secret.com is not eds-mac", "<private> is not <private>"),
        ("C0FFEE00-1234-4abc-8def-0123456789AB, file:///x", "<private>, file://<private>"),
        ("models/secret-7b: secret-7b, ../x", "<private>: <private>, ..<private>"),
        ("the owner is Pro-Ed.", "the owner is <private>."),
        (FIGURES, FIGURES),
    ],
)
def test_private_data_are_taken_out(text: str, left: str) -> None:
    assert without(private_data(["models/secret-7b", "."], MAC.machine), text) == left


@pytest.mark.parametrize("user", ["pro", "s"])
def test_a_user_whose_name_tells_nothing_may_be_named(
    monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    monkeypatch.setenv("USER", user)
    assert without(private_data([], MAC.machine), FIGURES) == FIGURES


@pytest.mark.usefixtures("ed")
def test_the_file_has_no_private_data(mac: dict[str, Mock], file: Path) -> None:
    texts = ("pro-ed", "/secret")
    mac["check_machine"].return_value = replace(MAC, reasons=texts, warnings=texts)
    mac["run_child"].return_value = Outcome("models/secret-7b is not there", "", 1.0)
    answers(file, "models/secret-7b")
    assert "<private>" in file.read_text()
    assert not {"pro-ed", "secret"} & set(re.findall(r"[\w-]+", file.read_text()))
