"""A process that dies within an act is remembered; no other is."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache import fault_memory
from kvcache.fault_memory import Act, FaultMemory
from kvcache.kv_backends import KVBackend
from kvcache.selftest.machine import this_machine
from kvcache.user_folders import cache_folder

# Says that it is within the act, and waits for its end.
WITHIN = """
import sys
from kvcache.fault_memory import Act, FaultMemory
from kvcache.kv_backends import KVBackend
with FaultMemory(KVBackend.SPARSE).intent(Act.MAP):
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

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITHIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


def is_remembered(memory: FaultMemory) -> bool:
    """Whether a process that was killed within its act is remembered afterwards."""
    Other().kill()
    return any("the first mapping" in fault for fault in memory.found())


def test_a_process_that_was_killed_within_its_act_is_remembered(memory: FaultMemory) -> None:
    assert is_remembered(memory)
    assert FaultMemory(KVBackend.PAGED).found() == ()


def test_that_test_fails_where_a_stale_intent_is_ignored(
    memory: FaultMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_memory, "_is_left_behind", lambda _: False)
    assert not is_remembered(memory)


def test_a_process_that_lives_within_its_act_is_no_fault(memory: FaultMemory) -> None:
    other = Other()
    assert memory.found() == ()
    assert not memory.forget()
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


def test_an_act_that_fails_is_a_fault(memory: FaultMemory, folder: Path) -> None:
    with pytest.raises(RuntimeError), memory.intent(Act.MAP):
        raise RuntimeError("no answer")
    (said,) = memory.found()
    assert "the first mapping failed: no answer" in said
    (path,) = folder.iterdir()
    assert path.name in said


def test_the_newest_fault_is_kept_until_it_is_forgotten(memory: FaultMemory) -> None:
    memory.record("one")
    memory.record("another")
    (said,) = memory.found()
    assert said.startswith("another, 20")
    assert is_remembered(memory)
    assert len(memory.found()) == 2
    assert memory.forget()
    assert memory.found() == ()
    assert not memory.forget()


@pytest.mark.parametrize("changed", ["model", "processor", "system", "mlx"])
def test_another_machine_system_or_mlx_is_not_to_blame(
    changed: str, memory: FaultMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.record("it hung")
    other = replace(this_machine(), **{changed: "another"})
    monkeypatch.setattr(fault_memory, "this_machine", lambda: other)
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
        pass
    memory.record("it hung")
    assert memory.found() == ()
    guarded, remembered = (record.getMessage() for record in caplog.records)
    assert "the first mapping of sparse on Metal is not guarded by a file" in guarded
    assert "a fault of sparse on Metal cannot be remembered" in remembered


def test_a_file_that_cannot_be_written_whole_is_not_left(
    memory: FaultMemory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", full)
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

    def unsupported(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert len(memory.found()) == 1


def test_a_mac_is_asked_to_write_through_its_drives_own_cache(
    memory: FaultMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fault_memory, "FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: asked.append(command))
    memory.record("it hung")
    assert asked == [51]


def test_reports_do_not_name_the_user(memory: FaultMemory, folder: Path) -> None:
    memory.record("it hung")
    (said,) = memory.found()
    assert f"(~/{folder.relative_to(Path.home())}/fault-" in said


def test_what_is_written_names_the_machine_for_people(memory: FaultMemory, folder: Path) -> None:
    memory.record("it hung")
    (path,) = folder.iterdir()
    assert path.parent == cache_folder()
    said = json.loads(path.read_text())
    assert said["what"] == "it hung"
    assert said["kv_backend"] == "sparse on Metal"
    assert said["system"] == this_machine().system
