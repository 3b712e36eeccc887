"""Code of Python that does not come to an end is ended, and nothing else is."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from server.text.time_limit import TimeLimit, TimeUp
from tests.server.harness import DEADLINE_S, eventually

SHORT_S = 0.1
ENDS = 1000
# In a process of its own: what measures and reports a test must not be hit. Threads take turns as
# often as they can.
ENDS_AT_ANY_TIME = f"""
import sys, threading
from server.text.time_limit import TimeLimit, TimeUp

sys.setswitchinterval(1e-5)
hits = 0
for attempt in range({ENDS}):
    limit, go = TimeLimit({DEADLINE_S}), threading.Event()

    def end(limit=limit, go=go):
        go.wait()
        limit.end()

    other = threading.Thread(target=end)
    other.start()
    try:
        with limit:
            go.set()
            for _ in range(attempt):
                sum(range(3))
    except TimeUp:
        hits += 1
    # Lines enough for whatever is still on its way.
    for _ in range(100):
        sum(range(3))
    other.join()
print(hits)
"""


def for_ever() -> None:
    """Code that catches whatever it can, and goes on."""
    while True:
        try:
            sum(i for i in range(1000))
        except Exception:
            continue


def within(limit: TimeLimit, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with limit:
            return work()

    return run


async def test_what_comes_to_an_end_is_left_alone() -> None:
    limit = TimeLimit(DEADLINE_S)
    assert await limit.run(within(limit, lambda: 7)) == 7
    limit = TimeLimit(DEADLINE_S)
    with pytest.raises(ZeroDivisionError):
        await limit.run(within(limit, lambda: 1 // 0))


async def test_what_does_not_is_ended_whatever_it_catches() -> None:
    limit = TimeLimit(SHORT_S)
    began = time.monotonic()
    with pytest.raises(TimeUp):
        await limit.run(within(limit, for_ever))
    assert SHORT_S <= time.monotonic() - began < DEADLINE_S


async def test_only_what_stands_within_is_ended() -> None:
    limit = TimeLimit(SHORT_S)

    def work() -> str:
        with limit:
            pass
        time.sleep(5 * SHORT_S)
        return "done"

    assert await limit.run(work) == "done"


async def test_time_counts_from_when_the_code_begins() -> None:
    limit = TimeLimit(5 * SHORT_S)

    def work() -> str:
        time.sleep(10 * SHORT_S)
        with limit:
            time.sleep(SHORT_S)
        return "done"

    assert await limit.run(work) == "done"


async def test_code_that_nobody_waits_for_any_more_is_ended() -> None:
    limit, ended = TimeLimit(DEADLINE_S), threading.Event()
    begun = threading.Event()

    def work() -> None:
        try:
            with limit:
                begun.set()
                for_ever()
        except TimeUp:
            ended.set()

    running = asyncio.ensure_future(limit.run(work))
    await eventually(begun.is_set)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually(ended.is_set)


def test_code_that_comes_too_late_does_not_begin() -> None:
    limit = TimeLimit(DEADLINE_S)
    limit.end()
    limit.end()
    with pytest.raises(TimeUp), limit:
        raise AssertionError("it began")


def test_an_end_that_comes_at_any_time_hits_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ANY_TIME], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert 0 < int(done.stdout) < ENDS


def test_an_end_that_comes_behind_the_code_is_waited_for() -> None:
    limit = TimeLimit(9.0)
    with pytest.raises(TimeUp), limit:
        limit._ended = True  # by another thread, whose exception is still on its way
