"""The watchdog ends a process that hangs; the processes are real."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from server.ray import watchdog
from server.ray.watchdog import Watchdog, watch

WITHIN_S = 20.0
PIPE_BYTES = 65_536
STARTING = """
import asyncio
from server.ray import watchdog
watchdog.BEAT_S = 0.05
async def live():
    dog = watchdog.Watchdog(silence_s=1.0, start_s={start_s})
    if {beats}:
        dog.start_beating()
    print("watched", flush=True)
    await asyncio.sleep(60)
asyncio.run(live())
"""


def watched(start_s: float, *, beats: bool) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-c", STARTING.format(start_s=start_s, beats=beats)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "watched\n"
    child.stdout.close()
    return child


def test_a_process_that_is_stopped_is_killed() -> None:
    child = watched(60.0, beats=True)
    time.sleep(1.5)
    assert child.poll() is None, "it is not killed as long as it goes on"
    os.kill(child.pid, signal.SIGSTOP)
    assert child.wait(WITHIN_S) == -signal.SIGKILL


def test_a_process_that_takes_too_long_to_start_is_killed() -> None:
    assert watched(1.0, beats=False).wait(WITHIN_S) == -signal.SIGKILL


def with_watcher() -> tuple[Watchdog, psutil.Process]:
    """A watchdog, and its second process."""
    before = psutil.Process().children()
    dog = Watchdog()
    (watcher,) = set(psutil.Process().children()) - set(before)
    return dog, watcher


def begin(dog: Watchdog) -> "asyncio.Task[None]":
    """Have it beat."""
    before = asyncio.all_tasks()
    dog.start_beating()
    (beating,) = asyncio.all_tasks() - before
    return beating


async def test_a_watchdog_that_has_ended_beats_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    dog = Watchdog()
    beating = begin(dog)
    await asyncio.sleep(0.05)
    assert not beating.done()
    dog.end()
    await asyncio.wait_for(beating, WITHIN_S)
    dog.end()


async def test_where_nobody_reads_its_beats_a_process_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    dog, watcher = with_watcher()
    watcher.kill()
    watcher.wait()
    await asyncio.wait_for(begin(dog), WITHIN_S)
    assert "nobody ends this process" in caplog.text
    dog.end()


async def test_a_full_pipe_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.0)
    dog, watcher = with_watcher()
    watcher.suspend()
    beating = begin(dog)
    for _ in range(2 * PIPE_BYTES):
        await asyncio.sleep(0)
    assert not beating.done()
    dog.end()


def test_a_watcher_kills_its_parent_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, sign: killed.append(pid))
    reading, writing = os.pipe()
    watch(reading, os.getppid(), 0.01, 5)
    assert capsys.readouterr().err == "no sign of life within 0.01 s: the replica is killed\n"
    watch(reading, -1, 0.01, 5)
    assert killed == [os.getppid()]
    os.write(writing, b".")
    watch(reading, os.getppid(), 5, 0.01)
    assert len(killed) == 2
    os.close(writing)
    watch(reading, os.getppid(), 5, 5)
    assert len(killed) == 2
    os.close(reading)
