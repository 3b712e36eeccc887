"""A process that dies within an act is remembered; no other is."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvcache.backends import faults
from kvcache.backends.choice import KVBackend
from kvcache.backends.faults import Act, FaultMemory, GPUFailure
from kvcache.selftest.machine import this_machine
from kvcache.user_folders import cache_folder
from tests.kvcache.backends.test_gpu_failures import TEXTS

# Says that it is within the act, and waits for its end.
WITHIN = """
import sys
from kvcache.backends.faults import Act, FaultMemory
from kvcache.backends.choice import KVBackend
memory = FaultMemory(KVBackend.SPARSE)
act = Act[sys.argv[1]]
with memory.session() if act is Act.SERVE else memory.intent(act):
    print("within", flush=True)
    sys.stdin.readline()
print("after", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Other processes find it, too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    found = cache_folder()
    found.parent.mkdir(parents=True)
    return found


@pytest.fixture
def memory() -> FaultMemory:
    return FaultMemory(KVBackend.SPARSE)


class Other:
    """Another process, within an act."""

    def __init__(self, act: Act = Act.MAP) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITHIN, act.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "within"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def test_a_process_that_lives_within_its_act_is_no_fault(memory: FaultMemory) -> None:
    other = Other()
    assert memory.found() == ()
    assert not memory.forget(stressed=True)
    other.go_on()
    assert other.line() == "after"
    assert memory.found() == ()
    other.kill()
    assert memory.found() == (), "it was killed in the middle of something else"


def test_an_act_that_ends_leaves_nothing(memory: FaultMemory, folder: Path) -> None:
    with memory.intent(Act.UNMAP), memory.intent(Act.UNMAP):
        assert len(list(folder.iterdir())) == 2
        assert memory.found() == ()
    assert list(folder.iterdir()) == []


def test_the_newest_fault_is_kept_until_it_is_forgotten(memory: FaultMemory, folder: Path) -> None:
    memory.record("one")
    memory.record("another")
    (path,) = folder.iterdir()
    written = json.loads(path.read_text())
    assert (written["kv_backend"], written["system"]) == ("sparse on Metal", this_machine().system)
    Other().kill()
    fault, crash = memory.found()
    assert fault.startswith("serving failed: another, 20")
    assert path.name in fault
    assert "quire or the machine ended within the first mapping" in crash
    assert FaultMemory(KVBackend.PAGED).found() == ()
    assert memory.forget(stressed=True)
    assert memory.found() == ()
    assert not memory.forget(stressed=True)


@pytest.mark.parametrize(("words", "failure"), TEXTS.items())
def test_only_what_the_memory_has_caused_is_its_fault(
    words: str, failure: GPUFailure | None, memory: FaultMemory
) -> None:
    with pytest.raises(RuntimeError), memory.intent(Act.MAP):
        raise RuntimeError(f"the GPU failed in zero_blocks: {words}")
    caused = failure in (None, GPUFailure.KV_MEMORY)
    assert [words in fault for fault in memory.found()] == [True] * caused


@pytest.mark.parametrize(
    ("boots", "crashes"), [("", 0), ("1", 1), ("11", 1), ("12", 2), ("123", 3), ("2221", 2)]
)
def test_a_machine_that_went_down_twice_while_serving_is_taken_seriously(
    boots: str, crashes: int, memory: FaultMemory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``boots`` has the start of the machine of each server that was cut off."""
    with ExitStack() as servers:
        for boot in boots:
            monkeypatch.setattr(faults, "boot_id", lambda boot=boot: boot)
            servers.enter_context(memory.session())
        left = {path: path.read_text() for path in folder.glob("*")}
    for path, text in left.items():
        path.write_text(text)
    monkeypatch.setattr(faults, "boot_id", lambda: "now")
    assert bool(memory.warning()) == (crashes == 1)
    assert len(memory.found()) == (crashes if crashes > 1 else 0)
    assert FaultMemory(KVBackend.PAGED).warning() == ""


def test_a_server_that_was_killed_says_nothing_about_the_machine_that_runs_on(
    memory: FaultMemory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        Other(Act.SERVE).kill()
        assert (memory.warning(), memory.found()) == ("", ())
        with memory.session():
            assert len(list(folder.iterdir())) == 1, "the one before is forgotten"
    Other(Act.SERVE).kill()
    monkeypatch.setattr(faults, "boot_id", lambda: "another")
    with memory.session():
        assert "the next time, another KV backend serves; `quire doctor --stress`" in (
            memory.warning()
        )
    assert not memory.forget(stressed=False)
    assert memory.forget(stressed=True)
    assert memory.warning() == ""


@pytest.mark.parametrize("act", Act)
def test_a_fault_under_load_is_forgotten_after_a_stress_test_only(
    act: Act, memory: FaultMemory
) -> None:
    memory.record("no answer", act)
    Other(act).kill()
    under_load = act in (Act.STRESS, Act.SERVE)
    assert memory.forget(stressed=False) != under_load
    assert bool(memory.found()) == under_load
    assert memory.forget(stressed=True) == under_load
    assert memory.found() == ()


@pytest.mark.parametrize("changed", ["model", "processor", "system", "mlx"])
def test_another_machine_system_or_mlx_is_not_to_blame(
    changed: str, memory: FaultMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.record("it hung")
    other = replace(this_machine(), **{changed: "another"})
    monkeypatch.setattr(faults, "this_machine", lambda: other)
    assert FaultMemory(KVBackend.SPARSE).found() == ()


@pytest.mark.parametrize("contents", [b"", b"[]", b"{", b"\xff", b'{"what": 3, "at": ""}'])
def test_a_file_that_cannot_be_read_is_heeded_all_the_same(
    contents: bytes, memory: FaultMemory, folder: Path
) -> None:
    memory.record("it hung")
    (path,) = folder.iterdir()
    path.write_bytes(contents)
    (said,) = memory.found()
    assert said == f"something that its file does not tell (~/{path.relative_to(Path.home())})"


def test_where_nothing_can_be_written_acts_go_on_with_a_warning(
    memory: FaultMemory, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    with memory.intent(Act.MAP):
        memory.record("it hung")
    assert memory.found() == ()
    assert "sparse on Metal: the first mapping is not written down" in caplog.text
    assert "sparse on Metal: serving failed: it hung is not written down" in caplog.text


def test_a_file_that_cannot_be_written_whole_is_not_left(
    memory: FaultMemory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "no space left")))
    with memory.intent(Act.MAP):
        assert list(folder.iterdir()) == []


def test_an_intent_that_ends_while_it_is_looked_at_is_no_fault(
    memory: FaultMemory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Other().kill()
    (path,) = folder.iterdir()
    locked = fcntl.flock

    def ends(file: int, how: int) -> None:
        path.unlink()
        locked(file, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", ends)
        assert memory.found() == ()
    monkeypatch.setattr(memory, "_files", lambda: [path])
    assert memory.found() == (), "or before"


def test_an_intent_whose_owner_cannot_be_asked_for_is_heeded(
    memory: FaultMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    Other().kill()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(95, "not supported")))
    assert len(memory.found()) == 1


def test_a_mac_is_asked_to_write_through_its_drives_own_cache(
    memory: FaultMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(faults, "FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: asked.append(command))
    memory.record("it hung")
    assert asked == [51]
