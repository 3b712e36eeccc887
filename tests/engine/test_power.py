"""A Mac is kept awake while it answers: against stand-ins for IOKit that are called through C."""

import ctypes
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine import power
from engine.power import CORE_FOUNDATION, IOKIT, KeepAwake, MacPower, SleepDetector, power_of

NUMBER = 1_000_000_007
"""Of an assertion: more than 16 bits."""
FIRST_TEXT = 0x1_0000_0000_0000
"""Of texts: more than 32 bits, as addresses have."""


class Mac:
    """CoreFoundation and IOKit, with the prototypes of CFString.h and IOPMLib.h."""

    def __init__(self, refuses: int = 0) -> None:
        """refuses: an IOReturn for whoever makes an assertion."""
        self.texts: dict[int, bytes] = {}
        self.held: dict[int, tuple[bytes, int, bytes]] = {}

        def make_text(allocator: int | None, text: bytes, encoding: int) -> int:
            assert (allocator, encoding) == (None, 0x08000100)
            number = FIRST_TEXT + len(self.texts)
            self.texts[number] = text
            return number

        def create(kind: int, level: int, name: int, out: Any) -> int:
            if not refuses:
                self.held[NUMBER] = (self.texts[kind], level, self.texts[name])
                out[0] = NUMBER
            return refuses

        def release(number: int) -> int:
            del self.held[number]
            return 0

        text = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32)(
            make_text
        )
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: self.texts.pop(number))
        made = ctypes.CFUNCTYPE(
            *(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_uint32),
        )(create)
        released = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint32)(release)
        self.libraries = {
            CORE_FOUNDATION: SimpleNamespace(CFStringCreateWithCString=text, CFRelease=free),
            IOKIT: SimpleNamespace(IOPMAssertionCreateWithName=made, IOPMAssertionRelease=released),
        }

    def load(self, path: str) -> Any:
        return self.libraries[path]


class Machine(MacPower):
    """A machine's power that notes what is held."""

    def __init__(self, *, low: bool = False) -> None:
        """low: whether it is in its low power mode."""
        self.low = low
        self.held: list[int] = []
        self.holds = 0
        self.mains = False
        self.error: OSError | None = None

    def hold(self, reason: str) -> int:
        if self.error is not None:
            raise self.error
        self.holds += 1
        self.held.append(self.holds)
        return self.holds

    def release(self, assertion: int) -> None:
        self.held.remove(assertion)

    def on_mains(self) -> bool:
        return self.mains

    def saves(self) -> bool:
        return self.low


def test_an_assertion_is_held_by_its_name_until_it_is_released() -> None:
    mac = Mac()
    own = MacPower(mac.load)
    assertion = own.hold("quire answers requests")
    assert assertion == NUMBER
    expected = (b"PreventUserIdleSystemSleep", 255, b"quire answers requests")
    assert mac.held == {NUMBER: expected}
    assert mac.texts == {}, "both texts are freed"
    own.release(assertion)
    assert mac.held == {}


def test_what_macos_refuses_is_an_error_with_its_number_and_leaks_no_text() -> None:
    mac = Mac(refuses=-0x1FFFFD3F)
    with pytest.raises(OSError, match="IOPMAssertionCreateWithName: -0x1ffffd3f"):
        MacPower(mac.load).hold("why")
    assert mac.texts == {}


@pytest.mark.parametrize(
    ("battery", "mains"),
    [(None, True), (SimpleNamespace(power_plugged=True), True)]
    + [(SimpleNamespace(power_plugged=plugged), False) for plugged in (False, None)],
)
def test_mains_are_known_by_the_battery(
    battery: object, mains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert MacPower(Mac().load).on_mains() == mains


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
    pmset = tmp_path / "pmset"
    pmset.write_text(f"#!/bin/sh\ntest \"$*\" = -g && printf '{said}'\n")
    pmset.chmod(0o755)
    monkeypatch.setattr(power, "PMSET", str(pmset))
    assert MacPower(Mac().load).saves() == saves


def test_a_mac_without_an_answer_is_taken_for_one_at_full_power(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(power, "PMSET", "/nowhere/pmset")
    assert not MacPower(Mac().load).saves()


def test_only_a_mac_is_kept_awake(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert power_of("linux") is None
    assert caplog.text == ""
    monkeypatch.setattr(power, "MacPower", lambda: Machine())
    assert isinstance(power_of("darwin"), Machine)

    def not_there() -> Machine:
        raise OSError("IOKit: not found")

    monkeypatch.setattr(power, "MacPower", not_there)
    assert power_of("darwin") is None
    assert "may fall asleep while it answers: IOKit: not found" in caplog.text


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
