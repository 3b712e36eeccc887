"""A Mac is kept awake while it answers: against stand-ins for macOS's programs."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine import power
from engine.power import KeepAwake, MacPower, SleepDetector, power_of


class Machine(MacPower):
    """A machine's power that notes what is held."""

    def __init__(self, *, low: bool = False) -> None:
        """low: whether it is in its low power mode."""
        self.low = low
        self.held: list[int] = []
        self.holds = 0
        self.mains = False
        self.error: OSError | None = None

    def hold(self) -> int:
        if self.error is not None:
            raise self.error
        self.holds += 1
        self.held.append(self.holds)
        return self.holds

    def release(self, holder: int) -> None:
        self.held.remove(holder)

    def on_mains(self) -> bool:
        return self.mains

    def saves(self) -> bool:
        return self.low


def write_program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_of_macos_runs_until_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(said := tmp_path / "said")
    program = write_program(tmp_path / "caffeinate", f'echo "$*" > {said}; exec sleep 60')
    monkeypatch.setattr(power, "CAFFEINATE", program)
    holder = MacPower().hold()
    assert said.read_text() == f"-i -w {os.getpid()}\n", "it ends with quire at the latest"
    assert psutil.pid_exists(holder)
    MacPower().release(holder)
    assert not psutil.pid_exists(holder)


@pytest.mark.parametrize(
    ("battery", "mains"),
    [(None, True), (SimpleNamespace(power_plugged=True), True)]
    + [(SimpleNamespace(power_plugged=plugged), False) for plugged in (False, None)],
)
def test_mains_are_known_by_the_battery(
    battery: object, mains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert MacPower().on_mains() == mains


@pytest.mark.parametrize(
    ("said", "saves"),
    [
        ("Currently in use:\n standby 1\n lowpowermode         1\n womp 1\n", True),
        ("Currently in use:\n lowpowermode         0\n womp 1\n", False),
        (" powermode            1\n", True),
        (" powermode            2\n", False),
        ("", False),
    ],
)
def test_a_low_power_mode_is_what_pmset_says(
    said: str, saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pmset = write_program(tmp_path / "pmset", f"test \"$*\" = -g && printf '{said}'")
    monkeypatch.setattr(power, "PMSET", pmset)
    assert MacPower().saves() == saves


def test_a_mac_without_an_answer_is_taken_for_one_at_full_power(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(power, "PMSET", "/nowhere/pmset")
    assert not MacPower().saves()


def test_only_a_mac_is_kept_awake() -> None:
    assert power_of("linux") is None
    assert isinstance(power_of("darwin"), MacPower)


def test_a_machine_is_held_awake_once_while_it_is_busy() -> None:
    machine = Machine()
    awake = KeepAwake(machine, others_may_ask=False)
    machine.mains = True
    for busy in (False, True, True, False, False, True):
        awake.update(busy=busy)
        assert len(machine.held) == busy
    assert machine.holds == 2
    awake.end()
    awake.end()
    assert machine.held == []


def test_a_machine_that_others_ask_is_held_awake_on_mains() -> None:
    machine = Machine()
    awake = KeepAwake(machine, others_may_ask=True)
    for mains, busy, held in (
        (False, False, 0),
        (True, False, 1),
        (False, True, 1),
        (False, False, 0),
    ):
        machine.mains = mains
        awake.update(busy=busy)
        assert len(machine.held) == held


def test_a_machine_that_refuses_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.error = OSError("no")
    awake = KeepAwake(machine, others_may_ask=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            awake.update(busy=True)
    assert len(caplog.records) == 1


def test_a_sleep_is_what_the_monotonic_clock_does_not_count() -> None:
    now_s, time_s = 5.0, 1000.0
    detector = SleepDetector(lambda: now_s, lambda: time_s)
    for passed_s, by_day_s, slept_s in (
        (1.0, 1.2, 0.0),  # clocks drift
        (1.0, 601.0, 600.0),
        (1.0, 1.0, 0.0),
        (92.0, 92.0, 0.0),  # the process stood still, and the machine did not
        (1.0, -1600.0, 0.0),  # the clock was set back
    ):
        now_s += passed_s
        time_s += by_day_s
        assert detector.slept_s() == pytest.approx(slept_s)
