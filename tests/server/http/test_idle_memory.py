import asyncio
import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from server.http import idle_memory
from server.http.idle_memory import release_free_memory, release_when_idle, use_one_arena
from server.routes.service import Service
from tests.server.harness import CHAT, Engine, chat, eventually

# Small pieces of many threads, and one behind each that stays.
PROGRAM = """
import gc, threading, psutil
from server.http.idle_memory import release_free_memory

def crowd():
    taken = [bytes(3000) for _ in range(20_000)]
    kept.append(bytes(3000))

kept = []
threads = [threading.Thread(target=crowd) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
gc.collect()
before = psutil.Process().memory_info().rss
release_free_memory()
print(before - psutil.Process().memory_info().rss)
"""

# Threads that allocate at the same time; then glibc prints each of its arenas.
ARENAS = """
import ctypes, threading
from server.http.idle_memory import use_one_arena

def crowd():
    together.wait()
    taken = [bytes(3000) for _ in range(1000)]
    together.wait()

use_one_arena()
together = threading.Barrier(4)
threads = [threading.Thread(target=crowd) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library = ctypes.CDLL(None)
library.fdopen.restype = ctypes.c_void_p
output = ctypes.c_void_p(library.fdopen(1, b"w"))
library.malloc_info(0, output)
library.fflush(output)
"""


async def test_memory_is_released_again_and_again_when_those_who_asked_have_left(
    engine: Engine, service: Service, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = 0

    def release() -> None:
        nonlocal released
        released += 1

    async def released_in_a_while() -> int:
        before = released
        await asyncio.sleep(0.1)
        return released - before

    monkeypatch.setattr(idle_memory, "LOOK_S", 0.01)
    monkeypatch.setattr(idle_memory, "release_free_memory", release)
    forgotten = 0

    def forget() -> None:
        nonlocal forgotten
        forgotten += 1

    releasing = asyncio.create_task(release_when_idle(service.drain, 0.05, forget))
    await http.get("/health")
    assert await released_in_a_while() == 0, "nobody has asked for anything"
    for _ in range(2):
        engine.gate.close()
        asking = asyncio.create_task(http.post(CHAT, json=chat(max_tokens=2)))
        await eventually(lambda: service.drain.answering > 0)
        await asyncio.sleep(0.1)  # what had begun before has ended
        assert await released_in_a_while() == 0, "somebody is there"
        engine.gate.open()
        assert (await asking).status_code == 200
        last, kept = released, forgotten
        # The engine gives memory back some time after the last answer.
        await eventually(lambda: released >= last + 3)  # noqa: B023
        await eventually(lambda: forgotten > kept)  # noqa: B023
    releasing.cancel()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="for glibc")
def test_what_was_free_within_the_process_is_the_systems_afterwards() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(ended.stdout) > 50 * 1024**2, "of 240 MiB"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="for glibc")
@pytest.mark.parametrize(("users", "several"), [(None, False), ("8", True)])
def test_threads_share_one_arena_unless_the_user_wants_more(
    monkeypatch: pytest.MonkeyPatch, users: str | None, several: bool
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if users:
        monkeypatch.setenv("MALLOC_ARENA_MAX", users)
    ended = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True
    )
    assert (ended.stdout.count("<heap nr=") > 1) == several


@pytest.mark.parametrize("names", [["mallopt"], []])
def test_only_glibc_is_told_of_arenas(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    told: list[tuple[int, ...]] = []
    calls = {name: lambda *how: told.append(how) for name in names}
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**calls))
    use_one_arena()
    assert told == [(-8, 1)] * len(names)


@pytest.mark.parametrize("names", [["malloc_trim"], ["malloc_zone_pressure_relief"], []])
def test_each_library_is_asked_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    asked: list[str] = []
    calls = {name: lambda *_, name=name: asked.append(name) for name in names}
    library: Any = SimpleNamespace(**calls)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    release_free_memory()
    assert asked == names
