"""What is tried, in which order, and what is made of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.doctor import examine as doctor
from engine.doctor.examine import Wishes, examine, read_extension
from engine.doctor.facts import facts
from engine.machine import GPU_HEADROOM_BYTES
from kvcache.canary import stamp
from kvcache.canary.report import TrialReport
from kvcache.canary.run import KERNELS, PACE, RELEASE, STRESS, SUBSTRATE, Outcome
from kvcache.canary.stamp import Passed
from kvcache.fault_memory import FaultMemory
from kvcache.substrates import NO_DEVICE, NO_METAL, Substrate
from tests.engine.doctor.reports import FAILED, PASSED
from tests.kvcache.metal_double import Device

WISHES = Wishes(EngineConfig())
Trials = dict[tuple[str, Substrate], TrialReport]


class Machine:
    """Answers for the processes that the doctor starts."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = facts() | {"has_metal": True, "metal": Device().said}
        self.outcome: Outcome | None = None
        self.reports: Trials = {}
        """Of trials that do not pass."""
        self.tried: list[tuple[str, Substrate, int | None]] = []

    def child(self, command: list[str], limit_s: float) -> Outcome:
        assert command[0] == sys.executable
        return self.outcome or Outcome("", json.dumps(self.facts), 0.1)

    def trial(
        self,
        what: str,
        substrate: Substrate,
        page_bytes: int | None = None,
        size: str = "",
        limit_s: float = 0.0,
    ) -> TrialReport:
        if what == PACE:
            return PASSED
        self.tried.append((what, substrate, page_bytes))
        return self.reports.get((what, substrate), PASSED)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A Mac whose user has no caches yet."""
    made = Machine()
    monkeypatch.setattr(doctor, "run_child", made.child)
    monkeypatch.setattr(doctor, "run_trial", made.trial)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return made


def quiet(_: str) -> None:
    pass


def test_this_machine_is_examined_for_real() -> None:
    told: list[str] = []
    report = examine(Wishes(EngineConfig(), release_test=sys.platform == "linux"), told.append)
    assert report.serves
    assert report.extension.matches
    assert report.of(Substrate.POSIX).fault == ""
    assert told[0] == "the extension"
    if sys.platform == "linux":
        assert report.chosen is Substrate.POSIX
        assert report.reasons == (f"posix: {NO_METAL}",)
        release = report.of(Substrate.POSIX).release
        assert release is not None
        assert release.passed
        assert report.of(Substrate.SPARSE).missing == NO_METAL


def test_a_machine_with_a_gpu_serves_from_it(machine: Machine) -> None:
    report = examine(WISHES, quiet)
    assert report.chosen is Substrate.SPARSE
    assert report.memory.max_buffer_bytes == 1 << 30
    assert report.memory.total_bytes <= 1 << 32
    assert report.headroom_bytes == GPU_HEADROOM_BYTES
    assert report.usable_bytes == report.memory.total_bytes - GPU_HEADROOM_BYTES
    tried = [(what, substrate) for what, substrate, _ in machine.tried]
    assert tried == [
        (SUBSTRATE, Substrate.SPARSE),
        (KERNELS, Substrate.SPARSE),
        (SUBSTRATE, Substrate.PAGED),
        (KERNELS, Substrate.PAGED),
        (SUBSTRATE, Substrate.METAL_DENSE),
        (KERNELS, Substrate.METAL_DENSE),
        (SUBSTRATE, Substrate.POSIX),
        (KERNELS, Substrate.POSIX),
    ]


def test_a_wheel_that_does_not_suit_the_chip_is_warned_of(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "wheel_warning", lambda _: "the wheel is old")
    assert examine(WISHES, quiet).warnings == ("the wheel is old",)
    machine.facts["metal"] = {}
    assert examine(WISHES, quiet).warnings == ()


def test_what_fails_its_canary_is_not_chosen_and_tried_no_further(machine: Machine) -> None:
    machine.reports[SUBSTRATE, Substrate.SPARSE] = FAILED
    report = examine(WISHES, quiet)
    assert report.chosen is Substrate.PAGED
    assert report.reasons[0] == "not sparse on Metal: map: refused"
    assert (KERNELS, Substrate.SPARSE, None) not in machine.tried


def test_what_the_device_lacks_is_not_tried(machine: Machine) -> None:
    machine.facts["metal"]["missing_for_sparse"] = ["no queue", "no heaps"]
    report = examine(WISHES, quiet)
    assert report.of(Substrate.SPARSE).missing == "no queue; no heaps"
    assert (SUBSTRATE, Substrate.SPARSE, None) not in machine.tried


def test_a_build_with_metal_may_find_no_device(machine: Machine) -> None:
    machine.facts["metal"] = {}
    report = examine(WISHES, quiet)
    assert report.device is None
    assert report.of(Substrate.SPARSE).missing == NO_DEVICE
    assert report.chosen is Substrate.POSIX


def test_an_extension_that_cannot_be_loaded_is_what_is_wrong_with_everything(
    machine: Machine,
) -> None:
    machine.outcome = Outcome("it ended with exit code 1: ImportError: no", "", 0.1)
    report = examine(WISHES, quiet)
    assert "ImportError" in report.extension.fault
    assert all("ImportError" in its.missing for its in report.examinations)
    assert machine.tried == []
    assert not report.serves


def test_an_extension_that_talks_nonsense_is_none(machine: Machine) -> None:
    machine.outcome = Outcome("", "nonsense", 0.1)
    assert read_extension().fault == "it said what cannot be read: 'nonsense'"


def test_what_was_asked_for_and_is_not_there_is_refused(machine: Machine) -> None:
    machine.reports[SUBSTRATE, Substrate.PAGED] = FAILED
    report = examine(Wishes(EngineConfig(substrate="paged")), quiet)
    assert (report.chosen, report.serves) == (None, False)
    assert report.reasons == ("paged on Metal does not work on this machine: map: refused",)


def test_pages_and_headroom_are_those_of_the_settings(machine: Machine) -> None:
    report = examine(
        Wishes(EngineConfig(page_bytes=16384, headroom_bytes=1 << 20), release_test=True), quiet
    )
    assert report.headroom_bytes == 1 << 20
    assert (SUBSTRATE, Substrate.SPARSE, 16384) in machine.tried
    assert (RELEASE, Substrate.SPARSE, 16384) in machine.tried
    assert (SUBSTRATE, Substrate.METAL_DENSE, None) in machine.tried


def test_a_passed_release_test_is_written_down_for_a_gpu_alone(machine: Machine) -> None:
    assert not stamp.is_there(Passed.RELEASE, Substrate.SPARSE)
    machine.reports[RELEASE, Substrate.PAGED] = FAILED
    report = examine(Wishes(EngineConfig(), release_test=True), quiet)
    sparse, paged, posix = (
        report.of(s) for s in (Substrate.SPARSE, Substrate.PAGED, Substrate.POSIX)
    )
    assert sparse.releases_heaps
    assert Path(sparse.remembered).is_file()
    assert stamp.is_there(Passed.RELEASE, Substrate.SPARSE)
    assert (paged.releases_heaps, paged.remembered) == (False, "")
    assert (posix.releases_heaps, posix.remembered) == (True, "")
    assert not stamp.is_there(Passed.RELEASE, Substrate.PAGED)
    assert report.of(Substrate.METAL_DENSE).release is None, "an arena is never released"


def test_a_release_test_that_fails_takes_back_the_one_that_passed(machine: Machine) -> None:
    wishes = Wishes(EngineConfig(), release_test=True)
    assert examine(wishes, quiet).of(Substrate.SPARSE).releases_heaps
    machine.reports[RELEASE, Substrate.SPARSE] = FAILED
    sparse = examine(wishes, quiet).of(Substrate.SPARSE)
    assert (sparse.releases_heaps, sparse.remembered) == (False, "")
    assert not stamp.is_there(Passed.RELEASE, Substrate.SPARSE)


def test_memory_is_mapped_while_steps_run_where_the_stress_test_has_passed(
    machine: Machine,
) -> None:
    report = examine(WISHES, quiet)
    assert report.maps_while_running is False
    assert report.reasons[-1] == (
        "memory is mapped between steps: its stress test has not passed here"
    )
    stressed = Wishes(EngineConfig(), release_test=True, stress=True)
    report = examine(stressed, quiet)
    assert report.maps_while_running is True
    assert report.reasons[-1] == "memory is mapped while steps run: its stress test has passed here"
    both = report.of(Substrate.SPARSE).remembered.split("; ")
    assert [Path(its).is_file() for its in both] == [True, True]
    assert examine(WISHES, quiet).maps_while_running is True
    by_hand = Wishes(EngineConfig(map_while_running=False))
    assert examine(by_hand, quiet).maps_while_running is False
    machine.reports[STRESS, Substrate.SPARSE] = FAILED
    assert examine(stressed, quiet).chosen is Substrate.PAGED
    assert not stamp.is_there(Passed.STRESS, Substrate.SPARSE)
    machine.reports.clear()
    assert examine(WISHES, quiet).maps_while_running is False


def test_what_serving_would_refuse_is_what_the_doctor_says(machine: Machine) -> None:
    bold = Wishes(EngineConfig(map_while_running=True))
    report = examine(bold, quiet)
    assert (report.chosen, report.maps_while_running) == (None, None)
    assert "run `quire doctor --stress`" in report.reasons[0]


def test_nothing_is_written_unless_it_is_asked_for(machine: Machine, tmp_path: Path) -> None:
    examine(WISHES, quiet)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_down_is_said(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("a file")
    report = examine(Wishes(EngineConfig(), release_test=True), quiet)
    sparse = report.of(Substrate.SPARSE)
    assert "it could not be written down" in sparse.remembered
    assert not sparse.releases_heaps


def test_what_computes_wrong_is_not_asked_to_release(machine: Machine) -> None:
    machine.reports[KERNELS, Substrate.SPARSE] = FAILED
    report = examine(Wishes(EngineConfig(), release_test=True), quiet)
    assert report.of(Substrate.SPARSE).release is None
    assert report.chosen is Substrate.SPARSE, "serving does not ask for more than the canary"
    assert not report.serves


def test_what_has_failed_here_is_forgotten_where_it_works_now(machine: Machine) -> None:
    FaultMemory(Substrate.SPARSE).record("it hung")
    stamp.write(Passed.RELEASE, Substrate.SPARSE)
    report = examine(WISHES, quiet)
    sparse = report.of(Substrate.SPARSE)
    assert "it hung" in sparse.faults[0]
    assert sparse.standing_faults == ()
    assert report.chosen is Substrate.SPARSE
    assert not stamp.is_there(Passed.RELEASE, Substrate.SPARSE), (
        "its release test was passed before the fault"
    )
    assert examine(WISHES, quiet).of(Substrate.SPARSE).faults == ()


@pytest.mark.parametrize("what", [SUBSTRATE, KERNELS])
def test_what_has_failed_here_and_still_fails_is_not(machine: Machine, what: str) -> None:
    FaultMemory(Substrate.SPARSE).record("it hung")
    machine.reports[what, Substrate.SPARSE] = FAILED
    report = examine(WISHES, quiet)
    assert report.of(Substrate.SPARSE).standing_faults == report.of(Substrate.SPARSE).faults
    assert report.chosen is Substrate.PAGED
    assert "it hung" in report.reasons[0]
    report = examine(Wishes(EngineConfig(substrate="sparse")), quiet)
    assert (report.chosen, report.serves) == (None, False)
    by_hand = Wishes(EngineConfig(), forget_faults=True)
    assert examine(by_hand, quiet).of(Substrate.SPARSE).standing_faults == ()


def test_what_cannot_be_forgotten_still_stands(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    FaultMemory(Substrate.SPARSE).record("it hung")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    report = examine(WISHES, quiet)
    assert len(report.of(Substrate.SPARSE).standing_faults) == 1
    assert report.chosen is Substrate.PAGED


def test_what_fails_under_running_commands_is_remembered_and_not_chosen(machine: Machine) -> None:
    machine.reports[STRESS, Substrate.SPARSE] = FAILED
    stressed = Wishes(EngineConfig(), release_test=True, stress=True)
    report = examine(stressed, quiet)
    sparse = report.of(Substrate.SPARSE)
    assert sparse.stress is FAILED
    assert sparse.release is None
    assert "the stress test failed: map: refused" in sparse.standing_faults[0]
    assert report.chosen is Substrate.PAGED
    assert report.of(Substrate.PAGED).stress is PASSED
    assert report.of(Substrate.METAL_DENSE).stress is None
    machine.reports.clear()
    assert examine(stressed, quiet).chosen is Substrate.SPARSE


def test_the_pages_of_a_cpu_are_stressed_too_and_not_remembered(machine: Machine) -> None:
    machine.reports[STRESS, Substrate.POSIX] = FAILED
    wishes = Wishes(EngineConfig(substrate="posix"), stress=True)
    report = examine(wishes, quiet)
    assert (report.chosen, report.serves) == (Substrate.POSIX, False)
    assert report.of(Substrate.POSIX).standing_faults == ()
