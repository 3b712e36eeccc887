"""The process by which a machine is in a cluster, with a stand-in for Ray."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from server.cli.cluster_folder import ClusterError, ClusterFolder, cluster_folder, ensure_key
from server.ray import ray_process
from server.ray.ray_process import (
    STARTED,
    addresses_of,
    environment,
    join_head,
    own_addresses,
    running,
    start_head,
    stop,
)

STARTS = f"import os, subprocess, sys, time; print({STARTED!r}, flush=True); "
WAITS = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
STAYS = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + STARTS + "time.sleep(60)"


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(ray_process, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(ray_process, "check_key", lambda *_: None)


@pytest.fixture
def folder() -> Iterator[ClusterFolder]:
    """What was started in it is waited for: commands leave that to the system."""
    yield cluster_folder()
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, 0)


@pytest.fixture
def key(folder: ClusterFolder) -> str:
    return ensure_key(folder.key)


def test_what_was_started_is_ended_with_its_children(
    folder: ClusterFolder, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, STARTS + WAITS)
    monkeypatch.setattr(ray_process, "STOP_TIMEOUT_S", 0.3)
    node = start_head(folder, key, "127.0.0.1", 1)
    assert (node.head, node.is_head) == ("127.0.0.1:1", True)
    process = running(folder)
    assert process is not None
    while not (children := process.children()):
        time.sleep(0.01)
    with pytest.raises(ClusterError, match="is in a cluster"):
        join_head(folder, key, "127.0.0.1:1")
    assert stop(folder)
    assert not any(child.is_running() and child.status() != "zombie" for child in children)
    assert running(folder) is None
    assert not stop(folder)


def test_a_machine_joins_with_the_address_that_the_head_sees(
    folder: ClusterFolder, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere")
    stand_in(monkeypatch, STARTS + "print(sys.argv, os.environ, flush=True); time.sleep(60)")
    node = join_head(folder, key, "localhost:1")
    assert not node.is_head
    while "--node-ip-address=127.0.0.1" not in folder.log.read_text():
        time.sleep(0.01)
    assert "--address=127.0.0.1:1" in folder.log.read_text(), "Ray does not find it by its name"
    assert key not in folder.log.read_text()
    assert "RAY_AUTH_MODE" in folder.log.read_text()
    assert "RAY_ADDRESS" not in folder.log.read_text(), "settings of Ray's are ours"
    assert stop(folder)


def test_what_a_killed_one_has_left_behind_is_ended_before_the_next_begins(
    folder: ClusterFolder, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    stand_in(monkeypatch, "import subprocess, sys, time; " + child + STARTS + "time.sleep(60)")
    node = start_head(folder, key, "127.0.0.1", 1)
    assert folder.node() == node
    ((orphan, _),) = node.family
    os.kill(node.pid, signal.SIGKILL)
    os.waitpid(node.pid, 0)
    assert running(folder) is None
    assert psutil.pid_exists(orphan)
    second = start_head(folder, key, "127.0.0.1", 1)
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == "zombie"
    os.kill(second.pid, signal.SIGKILL)
    os.waitpid(second.pid, 0)
    assert stop(folder), "there was something left"
    assert not stop(folder)


def test_why_ray_did_not_start_is_said(
    folder: ClusterFolder, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "print('one\\n\\ntwo'); raise SystemExit(1)")
    with pytest.raises(ClusterError, match="one two"):
        start_head(folder, key, "127.0.0.1", 1)
    stand_in(monkeypatch, "raise SystemExit(1)")
    with pytest.raises(ClusterError, match=r"see .*ray\.log"):
        start_head(folder, key, "127.0.0.1", 1)
    assert folder.node() is None


def test_what_hangs_is_killed(
    folder: ClusterFolder, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, STAYS)
    monkeypatch.setattr(ray_process, "STOP_TIMEOUT_S", 0.3)
    start_head(folder, key, "127.0.0.1", 1)
    assert stop(folder)
    stand_in(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(ray_process, "START_TIMEOUT_S", 0.0)
    with pytest.raises(ClusterError, match="within 0 s"):
        start_head(folder, key, "127.0.0.1", 1)
    assert running(folder) is None


def test_what_cannot_be_killed_is_said(
    folder: ClusterFolder, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, STAYS)
    monkeypatch.setattr(ray_process, "STOP_TIMEOUT_S", 0.1)
    node = start_head(folder, key, "127.0.0.1", 1)
    with monkeypatch.context() as stubborn:
        stubborn.setattr(psutil.Process, "kill", lambda _: None)
        with pytest.raises(ClusterError, match="does not end"):
            stop(folder)
    os.kill(node.pid, signal.SIGKILL)
    os.waitpid(node.pid, 0)
    assert running(folder) is None


def test_a_process_that_ends_while_it_is_looked_at_has_ended(
    folder: ClusterFolder, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, STARTS + "time.sleep(60)")
    start_head(folder, key, "127.0.0.1", 1)
    process = running(folder)
    assert process is not None

    def gone(_: psutil.Process) -> str:
        raise psutil.NoSuchProcess(1)

    with monkeypatch.context() as ending:
        ending.setattr(psutil.Process, "status", gone)
        assert running(folder) is None
    assert stop(folder)


def test_ray_gets_the_key_by_a_file_and_nobody_elses_settings(
    folder: ClusterFolder, key: str
) -> None:
    found = environment(folder)
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["RAY_AUTH_TOKEN_PATH"] == str(folder.key)
    assert found["RAY_USAGE_STATS_ENABLED"] == "0"
    assert key not in "".join(found.values())


def test_addresses_are_all_that_a_machine_has() -> None:
    found = own_addresses("10.0.0.1")
    assert {"10.0.0.1", "localhost", "127.0.0.1", socket.gethostname()} <= set(found)
    assert addresses_of("127.0.0.1:1") == ("127.0.0.1", "127.0.0.1:1")
    assert addresses_of("localhost:1") == ("127.0.0.1", "127.0.0.1:1")
    for wrong in ("nothing", "127.0.0.1:x"):
        with pytest.raises(ClusterError, match="HOST:PORT"):
            addresses_of(wrong)


def test_sockets_have_short_names() -> None:
    assert len(str(ray_process.session_folder())) < 30
    assert isinstance(ray_process.session_folder(), Path)
