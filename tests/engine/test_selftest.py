"""What is tried, in which order, and what is made of it."""

import json
import re
import resource
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import metal_ext
from engine import selftest
from engine.config import EngineConfig
from engine.journal import Journal
from engine.machine import GPU_HEADROOM_BYTES, MachineMemory
from engine.selftest import (
    SCHEMA,
    Extension,
    SelfTestOptions,
    check_machine,
    extension_facts,
    read_extension,
)
from engine.types import EngineFailedError
from kvcache.backends.choice import NO_DEVICE, NO_METAL, ON_METAL, KVBackend
from kvcache.backends.faults import Act, FaultMemory
from kvcache.selftest.run import Outcome, SelfTest, SelfTestReport, has_passed, write_stamp
from tests.engine.machine_reports import DEVICE, FAILED, GIB, MAC, PASSED, SAID, with_sparse
from tests.kvcache.metal_double import Device, install

WISHES = SelfTestOptions(EngineConfig())
Trials = dict[tuple[str, KVBackend], SelfTestReport]


class Machine:
    """Answers for the processes that the doctor starts."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = extension_facts() | {"has_metal": True, "metal": Device().said}
        self.outcome: Outcome | None = None
        self.reports: Trials = {}
        """Of trials that do not pass."""
        self.tried: list[tuple[str, KVBackend, int | None]] = []

    def child(self, command: list[str], limit_s: float) -> Outcome:
        assert command[0] == sys.executable
        return self.outcome or Outcome("", json.dumps(self.facts), 0.1)

    def trial(
        self,
        what: str,
        kv_backend: KVBackend,
        page_bytes: int | None = None,
        size: str = "",
        limit_s: float = 0.0,
    ) -> SelfTestReport:
        if what == SelfTest.PACE:
            return PASSED
        self.tried.append((what, kv_backend, page_bytes))
        return self.reports.get((what, kv_backend), PASSED)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A Mac whose user has no caches yet."""
    made = Machine()
    monkeypatch.setattr(selftest, "run_child", made.child)
    monkeypatch.setattr(selftest, "run_selftest", made.trial)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return made


def quiet(_: str) -> None:
    pass


def test_this_machine_is_examined_for_real() -> None:
    told: list[str] = []
    report = check_machine(
        SelfTestOptions(EngineConfig(), release_test=sys.platform == "linux"), told.append
    )
    assert report.serves
    assert report.extension.matches
    assert report.of(KVBackend.POSIX).fault == ""
    assert told[0] == "the extension"
    if sys.platform == "linux":
        assert report.chosen is KVBackend.POSIX
        assert report.reasons == (f"posix: {NO_METAL}",)
        assert report.of(KVBackend.POSIX).tests[SelfTest.RELEASE].passed
        assert report.of(KVBackend.SPARSE).missing == NO_METAL


def test_a_machine_with_a_gpu_serves_from_it(machine: Machine) -> None:
    report = check_machine(WISHES, quiet)
    assert report.chosen is KVBackend.SPARSE
    assert report.memory.max_buffer_bytes == 1 << 30
    assert report.memory.total_bytes <= 1 << 32
    assert report.headroom_bytes == GPU_HEADROOM_BYTES
    assert report.usable_bytes == report.memory.total_bytes - GPU_HEADROOM_BYTES
    tried = [(what, kv_backend) for what, kv_backend, _ in machine.tried]
    tests = (SelfTest.KV_BACKEND, SelfTest.KERNELS)
    assert tried == [(test, kv_backend) for kv_backend in KVBackend for test in tests]


def test_a_wheel_that_does_not_suit_the_chip_is_warned_of(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "wheel_warning", lambda _: "the wheel is old")
    assert check_machine(WISHES, quiet).warnings == ("the wheel is old",)
    machine.facts["metal"] = {}
    assert check_machine(WISHES, quiet).warnings == ()


def test_what_fails_its_canary_is_not_chosen_and_tried_no_further(machine: Machine) -> None:
    machine.reports[SelfTest.KV_BACKEND, KVBackend.SPARSE] = FAILED
    report = check_machine(WISHES, quiet)
    assert report.chosen is KVBackend.PAGED
    assert report.reasons[0] == "not sparse on Metal: map: refused"
    assert (SelfTest.KERNELS, KVBackend.SPARSE, None) not in machine.tried


def test_what_the_device_lacks_is_not_tried(machine: Machine) -> None:
    machine.facts["metal"]["missing_for_sparse"] = ["no queue", "no heaps"]
    report = check_machine(WISHES, quiet)
    assert report.of(KVBackend.SPARSE).missing == "no queue; no heaps"
    assert (SelfTest.KV_BACKEND, KVBackend.SPARSE, None) not in machine.tried


def test_a_build_with_metal_may_find_no_device(machine: Machine) -> None:
    machine.facts["metal"] = {}
    report = check_machine(WISHES, quiet)
    assert report.device is None
    assert report.of(KVBackend.SPARSE).missing == NO_DEVICE
    assert report.chosen is KVBackend.POSIX


def test_an_extension_that_cannot_be_loaded_is_what_is_wrong_with_everything(
    machine: Machine,
) -> None:
    machine.outcome = Outcome("it ended with exit code 1: ImportError: no", "", 0.1)
    report = check_machine(WISHES, quiet)
    assert "ImportError" in report.extension.fault
    assert all("ImportError" in its.missing for its in report.kv_backends)
    assert machine.tried == []
    assert not report.serves


def test_an_extension_that_talks_nonsense_is_none(machine: Machine) -> None:
    machine.outcome = Outcome("", "nonsense", 0.1)
    assert read_extension().fault == "it said what cannot be read: 'nonsense'"


def test_what_was_asked_for_and_is_not_there_is_refused(machine: Machine) -> None:
    machine.reports[SelfTest.KV_BACKEND, KVBackend.PAGED] = FAILED
    report = check_machine(SelfTestOptions(EngineConfig(kv_backend="paged")), quiet)
    assert (report.chosen, report.serves) == (None, False)
    assert report.reasons == ("paged on Metal does not work on this machine: map: refused",)


def test_pages_and_headroom_are_those_of_the_settings(machine: Machine) -> None:
    config = EngineConfig(page_bytes=16384, headroom_bytes=1 << 20)
    report = check_machine(SelfTestOptions(config, release_test=True), quiet)
    assert report.headroom_bytes == 1 << 20
    assert (SelfTest.KV_BACKEND, KVBackend.SPARSE, 16384) in machine.tried
    assert (SelfTest.RELEASE, KVBackend.SPARSE, 16384) in machine.tried
    assert (SelfTest.KV_BACKEND, KVBackend.METAL_DENSE, None) in machine.tried


def test_a_passed_release_test_is_written_down_for_a_gpu_alone(machine: Machine) -> None:
    assert not has_passed(SelfTest.RELEASE, KVBackend.SPARSE)
    machine.reports[SelfTest.RELEASE, KVBackend.PAGED] = FAILED
    report = check_machine(SelfTestOptions(EngineConfig(), release_test=True), quiet)
    sparse, paged, dense, posix = map(report.of, KVBackend)
    assert sparse.releases_heaps
    assert Path(sparse.remembered).is_file()
    assert has_passed(SelfTest.RELEASE, KVBackend.SPARSE)
    assert (paged.releases_heaps, paged.remembered) == (False, "")
    assert (posix.releases_heaps, posix.remembered) == (True, "")
    assert not has_passed(SelfTest.RELEASE, KVBackend.PAGED)
    assert SelfTest.RELEASE not in dense.tests, "an arena is never released"


def test_a_release_test_that_fails_takes_back_the_one_that_passed(machine: Machine) -> None:
    wishes = SelfTestOptions(EngineConfig(), release_test=True)
    assert check_machine(wishes, quiet).of(KVBackend.SPARSE).releases_heaps
    machine.reports[SelfTest.RELEASE, KVBackend.SPARSE] = FAILED
    sparse = check_machine(wishes, quiet).of(KVBackend.SPARSE)
    assert (sparse.releases_heaps, sparse.remembered) == (False, "")
    assert not has_passed(SelfTest.RELEASE, KVBackend.SPARSE)


def test_memory_is_mapped_while_steps_run_where_the_stress_test_has_passed(
    machine: Machine,
) -> None:
    report = check_machine(WISHES, quiet)
    assert report.maps_while_running is False
    assert report.reasons[-1].endswith("between steps: its stress test has not passed here")
    stressed = SelfTestOptions(EngineConfig(), release_test=True, stress=True)
    report = check_machine(stressed, quiet)
    assert report.maps_while_running is True
    assert report.reasons[-1] == "memory is mapped while steps run: its stress test has passed here"
    both = report.of(KVBackend.SPARSE).remembered.split("; ")
    assert [Path(its).is_file() for its in both] == [True, True]
    assert check_machine(WISHES, quiet).maps_while_running is True
    by_hand = SelfTestOptions(EngineConfig(map_while_running=False))
    assert check_machine(by_hand, quiet).maps_while_running is False
    machine.reports[SelfTest.STRESS, KVBackend.SPARSE] = FAILED
    assert check_machine(stressed, quiet).chosen is KVBackend.PAGED
    assert not has_passed(SelfTest.STRESS, KVBackend.SPARSE)
    machine.reports.clear()
    assert check_machine(WISHES, quiet).chosen is KVBackend.PAGED, "until a stress test passes"


def test_what_serving_would_refuse_is_what_the_doctor_says(machine: Machine) -> None:
    bold = SelfTestOptions(EngineConfig(map_while_running=True))
    report = check_machine(bold, quiet)
    assert (report.chosen, report.maps_while_running) == (None, None)
    assert "run `quire doctor --stress`" in report.reasons[0]


def test_nothing_is_written_unless_it_is_asked_for(machine: Machine, tmp_path: Path) -> None:
    check_machine(WISHES, quiet)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_down_is_said(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("a file")
    report = check_machine(SelfTestOptions(EngineConfig(), release_test=True), quiet)
    sparse = report.of(KVBackend.SPARSE)
    assert "it could not be written down" in sparse.remembered
    assert not sparse.releases_heaps


def test_what_computes_wrong_is_not_asked_to_release(machine: Machine) -> None:
    machine.reports[SelfTest.KERNELS, KVBackend.SPARSE] = FAILED
    report = check_machine(SelfTestOptions(EngineConfig(), release_test=True), quiet)
    assert SelfTest.RELEASE not in report.of(KVBackend.SPARSE).tests
    assert report.chosen is KVBackend.SPARSE, "serving does not ask for more than the canary"
    assert not report.serves


def test_what_has_failed_here_is_forgotten_where_it_works_now(machine: Machine) -> None:
    FaultMemory(KVBackend.SPARSE).record("it hung", Act.MAP)
    write_stamp(SelfTest.RELEASE, KVBackend.SPARSE)
    report = check_machine(WISHES, quiet)
    sparse = report.of(KVBackend.SPARSE)
    assert "it hung" in sparse.faults[0]
    assert sparse.standing_faults == ()
    assert report.chosen is KVBackend.SPARSE
    assert not has_passed(SelfTest.RELEASE, KVBackend.SPARSE), "that was before the fault"
    assert check_machine(WISHES, quiet).of(KVBackend.SPARSE).faults == ()


@pytest.mark.parametrize("kv_backend", ON_METAL)
def test_what_has_failed_under_load_is_forgotten_after_a_stress_test(
    machine: Machine, kv_backend: KVBackend
) -> None:
    FaultMemory(kv_backend).record("it hung")
    machine.reports[SelfTest.STRESS, kv_backend] = FAILED
    stressing = replace(WISHES, stress=True)
    for wishes in (WISHES, stressing):
        report = check_machine(wishes, quiet).of(kv_backend)
        assert bool(report.standing_faults) != kv_backend.is_dense, "a dense one has no such test"
    machine.reports.clear()
    assert check_machine(stressing, quiet).of(kv_backend).standing_faults == ()


@pytest.mark.parametrize(("by_hand", "works"), [(False, False), (False, True), (True, False)])
def test_deaths_of_engines_are_forgotten_where_a_gpu_works_or_by_hand(
    machine: Machine, by_hand: bool, works: bool
) -> None:
    Journal(KVBackend.PAGED).record(EngineFailedError("Insufficient Memory"))
    for kv_backend in ON_METAL:
        machine.reports[SelfTest.KERNELS, kv_backend] = PASSED if works else FAILED
    check_machine(replace(WISHES, forget_faults=by_hand), quiet)
    config = EngineConfig()
    assert (Journal(KVBackend.PAGED).gentler(config)[0] == config) == (by_hand or works)


@pytest.mark.parametrize("what", [SelfTest.KV_BACKEND, SelfTest.KERNELS])
def test_what_has_failed_here_and_still_fails_is_not(machine: Machine, what: str) -> None:
    FaultMemory(KVBackend.SPARSE).record("it hung", Act.MAP)
    machine.reports[what, KVBackend.SPARSE] = FAILED
    report = check_machine(WISHES, quiet)
    assert report.of(KVBackend.SPARSE).standing_faults == report.of(KVBackend.SPARSE).faults
    assert report.chosen is KVBackend.PAGED
    assert "it hung" in report.reasons[0]
    report = check_machine(SelfTestOptions(EngineConfig(kv_backend="sparse")), quiet)
    assert (report.chosen, report.serves) == (None, False)
    by_hand = SelfTestOptions(EngineConfig(), forget_faults=True)
    assert check_machine(by_hand, quiet).of(KVBackend.SPARSE).standing_faults == ()


def test_what_cannot_be_forgotten_still_stands(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    FaultMemory(KVBackend.SPARSE).record("it hung", Act.MAP)

    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError))
    report = check_machine(WISHES, quiet)
    assert len(report.of(KVBackend.SPARSE).standing_faults) == 1
    assert report.chosen is KVBackend.PAGED


def test_what_fails_under_running_commands_is_remembered_and_not_chosen(machine: Machine) -> None:
    machine.reports[SelfTest.STRESS, KVBackend.SPARSE] = FAILED
    stressed = SelfTestOptions(EngineConfig(), release_test=True, stress=True)
    report = check_machine(stressed, quiet)
    sparse = report.of(KVBackend.SPARSE)
    assert sparse.tests[SelfTest.STRESS] is FAILED
    assert SelfTest.RELEASE not in sparse.tests
    assert "the stress test failed: map: refused" in sparse.standing_faults[0]
    assert report.chosen is KVBackend.PAGED
    assert report.of(KVBackend.PAGED).tests[SelfTest.STRESS] is PASSED
    assert SelfTest.STRESS not in report.of(KVBackend.METAL_DENSE).tests
    machine.reports.clear()
    assert check_machine(stressed, quiet).chosen is KVBackend.SPARSE


def test_the_pages_of_a_cpu_are_stressed_too_and_not_remembered(machine: Machine) -> None:
    machine.reports[SelfTest.STRESS, KVBackend.POSIX] = FAILED
    wishes = SelfTestOptions(EngineConfig(kv_backend="posix"), stress=True)
    report = check_machine(wishes, quiet)
    assert (report.chosen, report.serves) == (KVBackend.POSIX, False)
    assert report.of(KVBackend.POSIX).standing_faults == ()


def test_the_extension_says_what_it_is() -> None:
    said = extension_facts()
    assert said["mlx_built_for"]
    assert said["has_metal"] == metal_ext.HAS_METAL
    assert said["system_page_bytes"] == metal_ext.SYSTEM_PAGE_BYTES
    assert said["instruction_sets"] == metal_ext.instruction_sets()
    assert json.loads(json.dumps(said)) == said


def test_a_metal_build_says_what_its_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = install(monkeypatch)
    assert extension_facts()["metal"] == device.said


@pytest.mark.parametrize("metal", [False, True])
def test_it_says_who_multiplies(monkeypatch: pytest.MonkeyPatch, metal: bool) -> None:
    monkeypatch.setattr(metal_ext, "HAS_METAL", metal)
    monkeypatch.setattr(metal_ext, "metal_capabilities", dict, raising=False)
    assert extension_facts()["matrix_products"] == (
        "quire's own of few rows, MLX's" if metal else "quire's own"
    )


def test_it_is_a_program_that_writes_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "engine.selftest")
    runpy.run_module("engine.selftest", run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == extension_facts()


def test_the_limits_of_open_files_are_told_and_what_becomes_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse = Mock(side_effect=ValueError("current limit exceeds maximum limit"))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    assert extension_facts()["open_files"] == {"soft": 256, "hard": None, "raised": 256}


def test_a_machine_serves_where_what_was_chosen_works() -> None:
    assert MAC.serves
    assert not replace(MAC, chosen=None).serves
    assert not replace(MAC, chosen=KVBackend.PAGED).serves
    assert not replace(MAC, chosen=KVBackend.METAL_DENSE).serves
    assert replace(MAC, chosen=KVBackend.POSIX).serves


def test_wrong_arithmetic_does_not_change_the_choice_but_the_verdict() -> None:
    report = with_sparse({SelfTest.KERNELS: FAILED})
    assert report.of(KVBackend.SPARSE).refusal == ""
    assert report.of(KVBackend.SPARSE).fault == "map: refused"
    assert not report.serves


def test_versions_match_or_they_do_not() -> None:
    assert MAC.extension.matches
    assert not Extension("0.32.5", "", SAID).matches
    assert not Extension("0.32.4", "it cannot be loaded", {}).matches


@pytest.mark.parametrize(
    ("memory", "usable"),
    [
        (MachineMemory(12 * GIB, 10 * GIB), 9 * GIB),
        (MachineMemory(12 * GIB, 5 * GIB), 5 * GIB),
        (MachineMemory(2 * GIB, 5 * GIB), 0),
        (MachineMemory(12 * GIB, 5 * GIB, on_gpu=True), 9 * GIB),
    ],
)
def test_what_is_usable_is_what_a_plan_starts_from(memory: MachineMemory, usable: int) -> None:
    assert replace(MAC, memory=memory).usable_bytes == usable


def test_a_report_is_one_json_object_with_a_version() -> None:
    said = json.loads(json.dumps(MAC.as_json()))
    assert said["schema"] == SCHEMA == 1
    assert set(said) == {
        "schema", "serves", "machine", "python", "extension", "metal", "kv_backends", "wheel",
        "pace", "pressure", "memory", "choice",
    }  # fmt: skip
    assert said["machine"]["model"] == "Mac15,6"
    assert said["extension"]["matches"]
    assert said["metal"] == DEVICE.said
    sparse, paged, dense, posix = said["kv_backends"]
    assert (sparse["works"], paged["works"], dense["works"]) == (True, False, False)
    assert (dense["name"], dense["on_gpu"]) == ("dense", True)
    assert dense["canary"] is dense["kernels"] is dense["release_test"] is None
    assert paged["fault"] == "map: refused"
    assert posix["canary"]["steps"][0]["name"] == "map"
    assert said["choice"] == {
        "name": "sparse", "on_gpu": True, "maps_while_running": False, "warnings": [],
        "reasons": ["sparse on Metal: it passed its canary"],
    }  # fmt: skip
    assert said["memory"]["usable_bytes"] == 9 * GIB


def test_a_machine_without_a_choice_is_json_too() -> None:
    said = json.loads(json.dumps(replace(MAC, chosen=None, device=None).as_json()))
    assert said["choice"]["name"] is said["choice"]["on_gpu"] is said["metal"] is None
    assert not said["serves"]


def test_metal_md_names_the_places_of_what_only_a_mac_can_say() -> None:
    said = replace(MAC, pace=PASSED).as_json()
    facts = {"extension": extension_facts().keys(), "kv_backends": said["kv_backends"][0]}
    text = (Path(__file__).parents[2] / "metal_ext/README.md").read_text()
    places = re.findall(r"^\| F\d+ \| `([\w.]+)` \|", text, re.MULTILINE)
    assert len(places) == 10
    for place in places:
        first, _, second = place.partition(".")
        assert first in said
        assert not second or second in facts[first]
