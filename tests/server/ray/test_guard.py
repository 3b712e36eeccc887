"""What ends a process that hangs, beside real processes."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from server.ray import guard
from server.ray.guard import Guard, watch

WITHIN_S = 20.0
STARTING = """
from server.ray import guard
guard.BEAT_S = 0.05
kept = guard.Guard(silence_s=1.0, start_s={start_s})
print("guarded", flush=True)
kept._watching.wait(60)
"""


def guarded(start_s: float) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-c", STARTING.format(start_s=start_s)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "guarded\n"
    child.stdout.close()
    return child


def test_a_process_that_is_stopped_while_it_starts_is_killed() -> None:
    child = guarded(60.0)
    time.sleep(1.5)
    assert child.poll() is None, "it is not killed as long as it goes on"
    os.kill(child.pid, signal.SIGSTOP)
    assert child.wait(WITHIN_S) == -signal.SIGKILL


def test_a_process_that_takes_too_long_to_start_is_killed() -> None:
    assert guarded(0.2).wait(WITHIN_S) == -signal.SIGKILL


async def test_when_it_has_started_signs_of_life_are_its_event_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "BEAT_S", 0.01)
    made = Guard()
    made.started()
    await asyncio.sleep(0.05)
    assert made._beating is not None
    assert not made._beating.done()
    made.end()
    await asyncio.wait_for(made._beating, WITHIN_S)
    made.end()


async def test_where_nobody_reads_its_signs_of_life_a_process_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "BEAT_S", 0.01)
    made = Guard()
    made._watching.kill()
    made._watching.wait()
    made.started()
    assert made._beating is not None
    await asyncio.wait_for(made._beating, WITHIN_S)
    assert "nobody ends this process" in caplog.text
    made.end()


def test_a_full_pipe_is_a_sign_of_life() -> None:
    made = Guard()
    made._watching.send_signal(signal.SIGSTOP)
    os.waitpid(made._watching.pid, os.WUNTRACED)
    # A page that is not full takes single bytes after it has refused a whole page.
    for size in (select.PIPE_BUF, 1):
        while made._beats.write(b"." * size):
            pass
    assert made._beat()
    made.end()


def test_who_watches_kills_its_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, sign: killed.append(pid))
    reading, writing = os.pipe()
    watch(reading, os.getppid(), 0.01)
    watch(reading, -1, 0.01)
    assert killed == [os.getppid()]
    os.write(writing, b".")
    os.close(writing)
    watch(reading, os.getppid(), 5)
    assert len(killed) == 1
    os.close(reading)


def test_one_that_takes_too_long_to_start_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "BEAT_S", 0.01)
    made = Guard(start_s=0.1)
    ends_at = time.monotonic() + WITHIN_S
    while not caplog.messages and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert caplog.messages == ["not ready within 0.1 s"]
    made.end()
