import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine.machine import release_free_memory, use_one_arena

# Small pieces of many threads, and one behind each that stays.
PROGRAM = """
import gc, threading, psutil
from engine.machine import release_free_memory

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
from engine.machine import use_one_arena

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

# Arrays of steps, and a few between them that stay.
STEP = """
import mlx.core as mx
import psutil
from engine.machine import use_one_arena
from engine.runner import ModelRunner

use_one_arena()
mx.set_default_device(mx.cpu)
runner = ModelRunner(None, None)
taken = [mx.full(50_000, 1.0) for _ in range(500)]
mx.eval(taken)
kept = taken[::50]
del taken
before = psutil.Process().memory_info().rss
runner.release_cache()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="for glibc")
def test_what_was_free_within_the_process_is_the_systems_afterwards() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(ended.stdout) > 50 * 1024**2, "of 240 MiB"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="for glibc")
def test_what_steps_took_is_the_systems_when_the_engine_releases_its_caches() -> None:
    ended = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert int(ended.stdout) > 80 * 1024**2, "of 95 MiB"


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
