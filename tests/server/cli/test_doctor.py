import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engine.first_hour import FirstHour
from engine.selftest import Extension, MachineReport, SelfTestOptions
from kvcache.backends.choice import KVBackend
from kvcache.selftest.run import SelfTest
from server.cli import doctor
from server.cli.doctor import report_lines, run_doctor
from server.config import Config, SettingError, engine_config
from tests.engine.machine_reports import FAILED, MAC, PASSED, SAID, with_sparse
from tests.metal_ext.programs import output_of


@pytest.mark.parametrize("file", [None, Path("quire.toml")])
def test_the_first_hour_is_told_answer_by_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quire.toml").touch()
    hours: list[FirstHour] = []

    def answers(hour: FirstHour, _: object) -> Iterator[dict[str, Any]]:
        hours.append(hour)
        hour.report = MAC
        steps = [{"name": name, "said": "well", "seconds": 2.0} for name in "abcd"]
        yield {"id": "a test", "question": "How?", "steps": steps, "fault": ""}
        yield {"id": "a test", "question": "How?", "steps": [], "fault": "no GPU"}

    monkeypatch.setattr(FirstHour, "answers", answers)
    told: list[str] = []
    assert doctor.run_first_hour(file, {}, ["demo"], lambda _: None, told.append)
    steps = [f"    {name}: well (2.00 s)" for name in "bcd"]
    assert told[:-1] == ["a test: How?", *steps, "    done", "a test: How?", "    no GPU"]
    assert str(hours[0].path) in told[-1]
    assert hours[0].bench == [*doctor.BENCH, "--json", *(["--config", str(file)] if file else [])]


def test_a_folder_in_which_nothing_can_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FirstHour, "answers", mock.Mock(side_effect=PermissionError(13, "no")))
    with pytest.raises(SettingError, match=r"quire-first-hour-.*log: no: run this in a folder"):
        doctor.run_first_hour(None, {}, ["demo"], pytest.fail, pytest.fail)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SelfTestOptions]:
    """What a doctor who finds a Mac was asked."""
    seen: list[SelfTestOptions] = []

    def check_machine(wishes: SelfTestOptions, told: Callable[[str], None]) -> MachineReport:
        told("everything")
        seen.append(wishes)
        return MAC

    monkeypatch.setattr(doctor, "check_machine", check_machine)
    return seen


def test_the_settings_say_what_is_examined(asked: list[SelfTestOptions], tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(
        "[cache]\npage_size = '16KiB'\nheadroom = '1MiB'\nkv_backend = 'posix'\n"
        "map_while_running = false\n"
    )
    told: list[str] = []
    text, serves = run_doctor(
        file, {"cache": {"kv_backend": "paged"}}, told.append, release_test=True
    )
    (wishes,) = asked
    assert (wishes.release_test, wishes.stress, wishes.forget_faults) == (True, False, False)
    config = wishes.config
    assert (config.kv_backend, config.page_bytes) == ("paged", 16384)
    assert (config.headroom_bytes, config.map_while_running) == (1 << 20, False)
    assert told == ["everything"]
    assert text.endswith("sparse on Metal can serve.")
    assert serves


def test_json_is_one_object(asked: list[SelfTestOptions]) -> None:
    text, serves = run_doctor(None, {}, lambda _: None, as_json=True)
    assert json.loads(text) == json.loads(json.dumps(MAC.as_json()))
    assert serves
    assert asked == [SelfTestOptions(engine_config(Config()))]


def test_the_doctor_loads_neither_mlx_nor_the_extension() -> None:
    assert (
        output_of("""
        import sys
        import server.cli.commands, server.cli.doctor
        print({"mlx.core", "metal_ext"} & set(sys.modules))
    """)
        == "set()"
    )


def text(report: MachineReport) -> str:
    return "\n".join(report_lines(report))


def test_a_machine_is_described_in_plain_words() -> None:
    said = text(MAC)
    for words in (
        "Mac15,6, Apple M3 Pro",
        "macOS 26.4 (25E246), Python 3.12.1",
        "built for MLX 0.32.4, which is installed",
        "Apple M3 Pro: working set 12.00 GiB, largest buffer 9.00 GiB; families: apple9, metal4; "
        "unified memory: yes; residency sets: no; sort: 3",
        "12.00 GiB, of which 10.00 GiB are available and 3.00 GiB are left to others: 9.00 GiB for",
        "sparse on Metal works",
        "canary: 2 steps in 1.5 s, passed",
        "    map: two blocks",
        "heaps are kept until the process ends: no release test has passed here",
        "paged on Metal  does not work",
        "canary: 1 steps in 0.5 s, failed: map: refused",
        "    FAILED map: refused",
        "dense on Metal  not here: the device's memory is not the processor's",
        "posix           works",
    ):
        assert words in said
    assert "missing_for" not in said
    assert said.endswith("sparse on Metal: it passed its canary\nsparse on Metal can serve.")


def test_the_reasons_of_a_choice_have_their_name() -> None:
    said = text(replace(MAC, reasons=("not sparse on Metal: it hung", "paged on Metal: it passed")))
    choice = "choice     not sparse on Metal: it hung\n           paged on Metal: it passed"
    assert f"\n\n{choice}\nsparse on Metal can serve." in said


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (replace(MAC, chosen=None), "Nothing can serve as configured."),
        (
            with_sparse({SelfTest.KERNELS: FAILED}),
            "sparse on Metal would serve, and it does not work here: map: refused.",
        ),
        (replace(MAC, chosen=KVBackend.POSIX), "posix can serve."),
    ],
)
def test_the_last_line_is_the_verdict(report: MachineReport, words: str) -> None:
    assert report_lines(report)[-1] == words


def test_an_extension_that_does_not_fit_is_said_first() -> None:
    broken = Extension("0.32.5", "it ended with exit code 1: ImportError: no", {})
    said = text(replace(MAC, extension=broken, device=None))
    assert "extension  cannot be loaded: it ended with exit code 1: ImportError: no" in said
    assert "Metal      not in this build" in said
    other = text(replace(MAC, extension=Extension("0.32.5", "", SAID), device=None))
    assert "built for MLX 0.32.4, which is not what is installed" in other
    assert "Metal      no device" in other


def test_a_release_test_is_told_of_with_what_follows_from_it() -> None:
    said = text(
        with_sparse({SelfTest.RELEASE: PASSED}, releases_heaps=True, remembered="/somewhere")
    )
    assert "release test: 2 steps in 1.5 s, passed" in said
    assert "written down: /somewhere" in said
    assert "heaps are given back when they are empty, unless cache.release_heaps is false" in said


def test_a_stress_test_is_told_of_with_its_last_word() -> None:
    said = text(with_sparse({SelfTest.STRESS: PASSED}))
    assert "stress test: 2 steps in 1.5 s, passed\n    in order\n" in said
    failed = text(with_sparse({SelfTest.STRESS: replace(FAILED, results=())}))
    assert "stress test: 0 steps in 0.5 s, failed: map: refused\n  heaps" in failed
    assert "sparse on Metal would serve, and it does not work here: map: refused." in failed


def test_what_should_be_done_is_told_before_the_verdict() -> None:
    said = text(replace(MAC, wheel="macosx_15_0", warnings=("the wheel is old", *MAC.reasons)))
    assert "MLX        0.32.4, macosx_15_0\n" in said
    assert "passed its canary\nwarning    the wheel is old\nsparse on Metal can serve." in said


def test_what_a_kv_backend_has_done_here_is_told_with_what_became_of_it() -> None:
    said = text(with_sparse(faults=("it hung", "it crashed"), standing_faults=("it hung",)))
    assert "works\n  has failed here: it hung\n" in said
    assert "  had failed here, which is forgotten now: it crashed\n" in said
    assert "not here: no\n  has failed here: it hung" in text(
        with_sparse(missing="no", standing_faults=("it hung",))
    )
