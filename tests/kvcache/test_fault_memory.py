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
    assert memory.forget(stressed=True)
    assert memory.found() == ()
    assert not memory.forget(stressed=True)


# Metal's words, as MLX hands them on.
METAL = "[METAL] Command buffer execution failed: "
INNOCENT = (
    "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
    "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
    "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
    "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
    "Discarded (victim of GPU error/recovery) "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
)
GUILTY = (
    "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)",
    "the first mapping took over 20 s",
)


@pytest.mark.parametrize("words", [*INNOCENT, *GUILTY])
def test_only_what_the_memory_has_caused_is_its_fault(words: str, memory: FaultMemory) -> None:
    memory.record(f"serving failed: {METAL}{words}")
    with pytest.raises(RuntimeError), memory.intent(Act.MAP):
        raise RuntimeError(f"the GPU failed in zero_blocks: {words}")
    assert bool(memory.found()) == (words in GUILTY)


# --- the machine goes down while the backend serves ----------------------------------------------

RESTARTS = [(), (1,), (1, 1), (1, 2), (1, 2, 3), (2, 2, 2, 1)]


@pytest.mark.parametrize("boots", RESTARTS)
def test_a_machine_that_went_down_twice_while_serving_is_taken_seriously(
    boots: tuple[int, ...], memory: FaultMemory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``boots`` are the numbers of the starts in which a server was cut off; several at once are
    one crash."""
    sessions: dict[Path, str] = {}
    for boot in boots:
        with monkeypatch.context() as patch:
            patch.setattr(fault_memory, "boot_id", lambda boot=boot: f"boot {boot}")
            with memory.session():
                (path,) = folder.iterdir()
                sessions[path] = path.read_text()
    for path, text in sessions.items():
        path.write_text(text)
    assert len(sessions) == len(boots)
    crashes = len(set(boots))
    assert bool(memory.warning()) == (crashes == 1)
    assert len(memory.found()) == (crashes if crashes > 1 else 0)
    assert all("this machine went down while quire served" in said for said in memory.found())
    assert FaultMemory(KVBackend.PAGED).warning() == ""


def test_a_server_that_was_killed_says_nothing_about_the_machine(
    memory: FaultMemory, folder: Path
) -> None:
    for _ in range(3):
        Other(Act.SERVE).kill()
    assert (memory.warning(), memory.found()) == ("", ())
    assert len(list(folder.iterdir())) == 1, "the others were forgotten by the next one"
    with memory.session():
        assert memory.warning() == ""
    assert list(folder.iterdir()) == [], "an ordered end leaves nothing"


def test_a_server_that_was_killed_before_the_machine_was_started_again_counts_as_a_crash(
    memory: FaultMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    Other(Act.SERVE).kill()
    monkeypatch.setattr(fault_memory, "boot_id", lambda: "another")
    assert memory.found() == ()
    assert "the next time, another KV backend serves; `quire doctor --stress`" in memory.warning()
    assert not memory.forget(stressed=False)
    assert memory.forget(stressed=True)
    assert memory.warning() == ""


def test_a_session_without_a_file_is_one_all_the_same(
    memory: FaultMemory, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    with memory.session():
        assert "serving of sparse on Metal is not guarded" in caplog.text


# --- what a test without load has proved --------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "forgotten"),
    [
        (Act.MAP, True),
        (Act.UNMAP, True),
        (Act.RELEASE, True),
        (Act.RELEASE_TEST, True),
        (Act.STRESS, False),
        (None, False),
    ],
)
def test_a_fault_under_load_is_forgotten_after_a_stress_test_only(
    act: Act | None, forgotten: bool, memory: FaultMemory
) -> None:
    if act is None:
        memory.record("serving failed: a mapping took over 20 s")
    else:
        with pytest.raises(RuntimeError), memory.intent(act):
            raise RuntimeError("no answer")
        Other(act).kill()
    assert memory.forget(stressed=False) == forgotten
    assert bool(memory.found()) != forgotten
    assert memory.forget(stressed=True) != forgotten
    assert memory.found() == ()


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
