"""The engine is monitored from outside: a step that hangs, a system without memory."""

import asyncio
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from typing import cast
from unittest.mock import Mock

import pytest

from engine import monitor as module
from engine.machine import PressureLevel
from engine.messages import CheckModel
from engine.monitor import LONGEST_BREAK_S, EngineMonitor, Watchdog
from engine.power import KeepAwake, SleepDetector
from engine.types import EngineDeadError, FinishReason, Request, SamplingParams
from tests.conftest import ENGINE_THREADS
from tests.engines import recall_client, submit
from tests.server.harness import Gate, ScriptedModel, eventually, start_engine
from tests.simulation.runner import Clock

WAIT_S = 10.0
PARAMS = SamplingParams(300, temperature=0.0)


def exit_code() -> int:
    return 7


@pytest.fixture(autouse=True)
def process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", _never)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come at once."""
    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "SHUTDOWN_GRACE_S", 0.05)


def test_threads_of_an_engine_have_the_names_that_each_test_must_leave_none_of() -> None:
    before = set(threading.enumerate())
    engine = start_engine()
    monitor = EngineMonitor(engine.client, watchdog_s=WAIT_S, pressure=None, exit_code=exit_code)
    monitor.start()
    names = {thread.name for thread in set(threading.enumerate()) - before}
    monitor.stop()
    engine.stop()
    assert names == ENGINE_THREADS


async def test_fault_10_a_step_that_hangs_ends_streams_and_process(
    fast: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = start_engine()
    client, gate = engine.client, engine.gate
    client.attach()
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    gate.closed = True
    entered = gate.entered
    stream = submit(client, tuple(range(50)), PARAMS)
    waiting = submit(client, tuple(range(60)), PARAMS)
    await eventually(lambda: gate.entered > entered)
    with caplog.at_level(logging.CRITICAL):
        monitor = EngineMonitor(client, watchdog_s=0.02, pressure=None, exit_code=exit_code)
        monitor.start()
        assert await asyncio.to_thread(ended.wait, WAIT_S)
    told = capfd.readouterr().err
    assert codes == [7]
    assert not client.alive, "/health says so"
    with pytest.raises(EngineDeadError):
        submit(client, (1,), PARAMS)
    for one in (stream, waiting):
        events = await one.next_batch(WAIT_S)
        assert (events[-1].finish, events[-1].message) == (
            FinishReason.ERROR,
            "the engine has ended",
        )
    assert 'File "' in told, "where every thread is"
    assert "pass_through" in told
    assert "a step of the engine has been running for" in caplog.text
    assert re.search(r"EngineStats\(running=[12],", caplog.text), "counts of the step that hangs"
    assert "the server did not end in time" in caplog.text
    assert not client.stop(WAIT_S), "at once: nobody waits for a thread that hangs"
    monitor.stop()
    gate.open()
    client._thread.join(WAIT_S)


async def test_a_server_that_ends_in_time_ends_by_itself(fast: None) -> None:
    client = _Hanging()
    monitor = EngineMonitor(
        client,  # type: ignore[arg-type]
        watchdog_s=0.001,
        pressure=None,
        exit_code=exit_code,
    )
    client.when_given_up = monitor._stopped.set
    monitor.start()
    assert await asyncio.to_thread(client.given_up.wait, WAIT_S)
    monitor.stop()


class _Hanging:
    """A client whose engine hangs from the start."""

    busy_since = 0.0
    step_age_s = 1.0
    stats = "no figures"
    pressure = 0

    def __init__(self) -> None:
        self.given_up = threading.Event()
        self.when_given_up: Callable[[], None] = _never

    def notice_sleep(self) -> None:
        pass

    def declare_dead(self) -> None:
        self.when_given_up()
        self.given_up.set()


def _never(*_: object) -> None:
    raise AssertionError("the process must not be ended")


async def test_an_engine_that_works_is_left_alone_however_long_it_works() -> None:
    gate = Gate()
    client = recall_client(model=lambda shape, vocab: ScriptedModel(shape, vocab, gate=gate))
    client.attach()
    clock = Clock()
    monitor = EngineMonitor(client, watchdog_s=5.0, pressure=None, exit_code=exit_code, clock=clock)
    stream = submit(client, (1, 2, 3), SamplingParams(20, temperature=0.0))
    while await stream.next_batch(WAIT_S):
        clock.now += 1.0
        assert monitor.poll()
    for _ in range(100):
        # The engine checks now and then whether there is work.
        await eventually(lambda: client.busy_since is None)
        clock.now += 1.0
        assert monitor.poll(), "an engine without work does not hang"
    assert client.step_age_s < WAIT_S
    assert client.stop(WAIT_S)
    assert client.step_age_s == 0.0


# --- memory pressure -------------------------------------------------------------------------


async def test_fault_25_the_engine_hears_how_short_of_memory_the_system_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = recall_client(prefix_keep_s=1000.0)
    client.attach()
    level = [PressureLevel.NORMAL]
    monitor = EngineMonitor(client, watchdog_s=30.0, pressure=lambda: level[0], exit_code=exit_code)
    stream = submit(client, tuple(range(100)), SamplingParams(1))
    while await stream.next_batch(WAIT_S):
        pass
    assert monitor.poll()
    assert client.pressure == 0
    await eventually(lambda: client.stats.kv is not None and client.stats.kv.cached_bytes > 0)
    level[0] = PressureLevel.WARNING
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert monitor.poll()
    assert caplog.text.count("memory pressure of the system: warning") == 1
    assert client.pressure == 1
    await eventually(lambda: client.stats.kv is not None and client.stats.kv.cached_bytes == 0)
    level[0] = PressureLevel.NORMAL
    monitor.poll()
    assert client.pressure == 0
    assert client.stop(WAIT_S)


# --- how long a step has been seen at work ------------------------------------------------------


LIMIT_S = 30.0


def first_bark(busy_since: float | None, checks: list[float]) -> float | None:
    """When a watchdog first says that the step takes too long."""
    watchdog = Watchdog(LIMIT_S)
    return next((now for now in checks if watchdog.check(now, busy_since)), None)


def seconds(start: float, end: float) -> list[float]:
    return [start + number for number in range(int(end - start) + 1)]


def test_a_step_is_too_long_when_it_has_been_seen_for_the_limit() -> None:
    assert first_bark(100.0, seconds(100, 200)) == 130.0


def test_a_step_counts_from_its_beginning_not_from_the_first_check_of_it() -> None:
    watchdog = Watchdog(2.0)
    assert not watchdog.check(10.0, None)
    assert not watchdog.check(11.0, 10.5)
    assert not watchdog.check(12.0, 10.5)
    assert watchdog.check(12.5, 10.5)


def test_an_idle_engine_may_be_idle_for_ever() -> None:
    assert first_bark(None, seconds(0, 1000)) is None


def test_steps_that_come_to_an_end_are_never_too_long_however_many_there_are() -> None:
    watchdog = Watchdog(LIMIT_S)
    assert not any(watchdog.check(now, now - now % 29) for now in seconds(0, 1000))


def test_a_process_that_stood_still_did_not_see_its_step_at_work() -> None:
    """Stopped for an hour and continued: the step gets its time all the same."""
    watchdog = Watchdog(LIMIT_S)
    assert not any(watchdog.check(now, 0.0) for now in seconds(0, 10))
    assert not watchdog.check(3610.0, 0.0)
    barks = [now for now in seconds(3611, 3700) if watchdog.check(now, 0.0)]
    assert barks[0] == 3610.0 + LIMIT_S - 10.0 - LONGEST_BREAK_S


# --- sleep ------------------------------------------------------------------------------------


def test_the_model_is_checked_after_a_sleep_and_only_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start_engine()
    clock, day = Clock(), Clock()
    engine.client._sleep = SleepDetector(clock, day)
    monitor = EngineMonitor(engine.client, watchdog_s=10.0, pressure=None, exit_code=exit_code)
    try:
        for asleep_s, checks in ((0.0, 0), (3600.0, 1), (0.0, 0)):
            before = engine.gate.entered
            clock.now += 1.0
            day.now += 1.0 + asleep_s
            with caplog.at_level(logging.INFO):
                assert monitor.poll()
            deadline_s = time.monotonic() + WAIT_S
            while engine.gate.entered < before + checks:
                assert time.monotonic() < deadline_s, "nobody asked the model"
            engine.rest()
            assert engine.gate.entered == before + checks
        assert caplog.text.count("the machine slept for 3600 s") == 1
        assert engine.client.alive
    finally:
        engine.stop()


async def test_a_request_that_comes_after_a_sleep_comes_after_the_check() -> None:
    engine = start_engine()
    clock, day = Clock(), Clock()
    client = engine.client
    client.attach()
    client._sleep = SleepDetector(clock, day)
    engine.gate.close()
    day.now = 3600.0
    assert client._loop is not None
    mailbox = client._loop.mailbox = Mock(wraps=queue.SimpleQueue())
    try:
        stream = submit(client, (1, 2), PARAMS)
        messages = [type(call.args[0]) for call in mailbox.put.call_args_list]
        assert messages == [CheckModel, Request]
        stream.close()
    finally:
        engine.stop()


def test_a_machine_is_kept_awake_while_there_are_requests() -> None:
    told: list[object] = []

    class Awake:
        def update(self, *, busy: bool) -> None:
            told.append(busy)

        def end(self) -> None:
            told.append("end")

    engine = start_engine()
    engine.gate.close()
    awake = cast(KeepAwake, Awake())
    monitor = EngineMonitor(
        engine.client, watchdog_s=10.0, pressure=None, exit_code=exit_code, awake=awake
    )
    monitor.poll()
    stream = submit(engine.client, (1, 2), PARAMS)
    monitor.poll()
    stream.close()
    engine.stop()
    assert told == [False, True]
    monitor.start()
    monitor.stop()
    assert told[-1] == "end"
