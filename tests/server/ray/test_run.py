"""What the commands do, without Ray."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

import server.ray
from server.cli.cluster_folder import ClusterError, ClusterFolder, Node, cluster_folder, ensure_key
from server.ray import replica, run
from server.ray.machines import ReplicaCounts
from server.ray.ray_process import HEAD_PORT
from server.ray.run import (
    cluster_status,
    join_cluster,
    serve_cluster,
    serve_from_start,
    start_cluster,
    stay_in_cluster,
    stop_cluster,
)

KEY = "0123456789abcdef" * 4


@dataclass
class Application:
    """Stands for the module of that name."""

    unfit: dict[str, str]
    deployed: list[tuple[Any, ...]]

    @contextmanager
    def connected(self, head: str) -> Iterator[None]:
        self.deployed.append(("connected", head))
        yield

    def machines(self) -> dict[str, str]:
        return {"n1": "one", "n2": "two"}

    def unfit_machines(self, plan: Any, asked: list[str]) -> dict[str, str]:
        return {name: why for name, why in self.unfit.items() if name in asked}

    def resize(self, plan: Any, counts: ReplicaCounts, unfit: list[str]) -> None:
        self.deployed.append(("resize", plan, counts, unfit))

    def deploy(self, plan: Any, counts: ReplicaCounts, unfit: list[str]) -> str:
        self.deployed.append(("deploy", plan, counts, unfit))
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return "http://here"

    def end(self) -> None:
        self.deployed.append(("end",))

    def status(self) -> str:
        return "as it is"


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Application:
    made = Application({}, [])
    module: Any = ModuleType("server.ray.application")
    names = "connected machines unfit_machines resize deploy end status"
    for name in names.split():
        setattr(module, name, getattr(made, name))
    module.Plan = lambda *its: SimpleNamespace(per_machine=its[-1])
    monkeypatch.setattr(server.ray, "application", module, raising=False)
    monkeypatch.setattr(replica, "version", lambda _: "1")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run, "WATCH_S", 0.02)
    return made


@pytest.fixture
def head() -> ClusterFolder:
    """A machine that is the head; its process is this one."""
    folder = cluster_folder()
    ensure_key(folder.key)
    folder.write_node(Node(os.getpid(), psutil.Process().create_time(), "head:1", is_head=True))
    return folder


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def serve(model: Path, **options: Any) -> list[str]:
    said: list[str] = []
    arguments: dict[str, Any] = {
        "replicas": None,
        "per_machine": 1,
        "file": None,
        "flags": {},
        "further": (),
    }
    serve_cluster(str(model), **(arguments | options), say=said.append)
    return said


def test_a_replica_on_each_machine_that_fits_until_told_to_end(
    application: Application, head: ClusterFolder, tiny_model: Path
) -> None:
    application.unfit = {"n2": "it is too small"}
    key = "sk-0123456789abcdef"
    said = serve(tiny_model, further=(f"access.api_keys={key}", "server.port=7"))
    assert said[0] == "no replica on two: it is too small"
    assert "http://here" in said[1]
    (_, _, counts, unfit) = application.deployed[1]
    assert (counts, unfit) == (ReplicaCounts(1, 1), ["n2"])
    assert key in head.settings.read_text()
    assert head.settings.stat().st_mode & 0o077 == 0
    assert application.deployed[-1] == ("end",)
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(head.key)


def test_more_replicas_than_fit_are_refused(
    application: Application, head: ClusterFolder, tiny_model: Path
) -> None:
    with pytest.raises(ClusterError, match="room for 2 replicas"):
        serve(tiny_model, replicas=ReplicaCounts(3, 3))
    application.unfit = {"n1": "no", "n2": "no"}
    with pytest.raises(ClusterError, match="room for 0 replicas"):
        serve(tiny_model)


def test_weights_that_are_missing_are_fetched(
    application: Application,
    head: ClusterFolder,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[bool] = []
    found = SimpleNamespace(
        missing=["weights"], folder=tiny_model, fetch_weights=lambda: fetched.append(True)
    )
    monkeypatch.setattr(run, "find_model", lambda *_, **_how: found)
    serve(tiny_model)
    assert fetched == [True]


def test_where_the_cluster_ends_serving_does(
    application: Application,
    head: ClusterFolder,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = server.ray.application

    def deploy(*_: object) -> str:
        head.forget_node()
        return "http://here"

    module.deploy = deploy
    with pytest.raises(ClusterError, match="has ended"):
        serve(tiny_model)


def test_a_machine_in_no_cluster_or_not_its_head_cannot_serve(
    application: Application, head: ClusterFolder, tiny_model: Path
) -> None:
    node = head.node()
    assert node is not None
    head.write_node(Node(node.pid, node.started, "elsewhere:1", is_head=False))
    with pytest.raises(ClusterError, match="elsewhere:1"):
        cluster_status()
    head.forget_node()
    with pytest.raises(ClusterError, match="in no cluster"):
        serve(tiny_model)
    assert stop_cluster() == "this machine is in no cluster"


def test_who_may_wait_serves_as_soon_as_a_machine_fits(
    application: Application,
    head: ClusterFolder,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = server.ray.application
    seen: list[dict[str, str]] = [{}, {"n1": "one"}]
    module.machines = lambda: seen.pop(0) if len(seen) > 1 else seen[0]
    said = serve(tiny_model, replicas=ReplicaCounts(3, 3), waits=True)
    assert application.deployed[1][2] == ReplicaCounts(1, 1)
    assert "by 1 replicas" in said[0]


def test_a_cluster_that_is_begun_to_serve_ends_with_it(
    head: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def stop(_: ClusterFolder) -> bool:
        ended.append("ended")
        return len(ended) == 1

    monkeypatch.setattr(run, "stop", stop)
    monkeypatch.setattr(run, "start_cluster", lambda *given: ended.append(f"begun {given}"))
    said: list[str] = []

    def told() -> None:
        ended.append("serves")
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        serve_from_start("10.0.0.1", 5, told, said.append)
    assert caught.value.code == 0
    assert ended == ["ended", "begun ('10.0.0.1', 5)", "serves", "ended"]
    assert "has been ended" in said[0]
    serve_from_start(None, None, lambda: None, said.append)
    assert len(said) == 1


def test_a_machine_joins_again_whenever_its_cluster_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The head is away twice, then there and lost, and then there until we are told to end."""
    monkeypatch.setattr(run, "JOIN_AGAIN_S", 0.01)
    monkeypatch.setattr(run, "WATCH_S", 0.01)
    monkeypatch.setattr(run, "stop", lambda _: True)
    joins: list[str] = []
    told: list[int] = []

    def join(folder: ClusterFolder, key: str, head: str) -> None:
        joins.append(key)
        if len(joins) <= 2:
            raise ClusterError("nobody answers")

    def running(_: ClusterFolder) -> object:
        if len(joins) == 3:
            return None
        if not told:
            told.append(os.getpid())
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return object()

    monkeypatch.setattr(run, "join_head", join)
    monkeypatch.setattr(run, "running", running)
    said: list[str] = []
    key = ensure_key(tmp_path / "key")
    stay_in_cluster("head:1", tmp_path / "key", lambda: "unasked", said.append)
    assert joins == [key] * 4
    assert said[0] == "nobody answers"
    assert said[1].startswith("in the cluster of head:1")
    assert said[2] == "the cluster of head:1 has ended; joining it again"
    assert len(said) == 4
    assert cluster_folder().key.read_text() == key


def test_the_status_is_that_of_the_cluster(application: Application, head: ClusterFolder) -> None:
    assert cluster_status() == "as it is"
    assert application.deployed == [("connected", "head:1")]


def test_a_head_prints_how_to_join_and_never_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []

    def start_head(folder: ClusterFolder, key: str, address: str, port: int) -> Node:
        started.append((key, address, port))
        return Node(1, time.time(), f"{address}:{port}", is_head=True)

    monkeypatch.setattr(run, "start_head", start_head)
    text = start_cluster("10.0.0.1", None)
    assert f"quire cluster join 10.0.0.1:{HEAD_PORT}" in text
    assert started[0][0] not in text
    monkeypatch.setattr(run, "addresses_of", lambda _: ("10.0.0.2", ""))
    assert "10.0.0.2:5" in start_cluster(None, 5)

    def nowhere(_: str) -> str:
        raise ClusterError("unreachable")

    monkeypatch.setattr(run, "addresses_of", nowhere)
    assert "127.0.0.1:5" in start_cluster(None, 5)


def test_the_key_comes_from_a_file_or_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    joined: list[tuple[str, str]] = []
    monkeypatch.setattr(run, "join_head", lambda folder, key, head: joined.append((key, head)))
    key = ensure_key(tmp_path / "key")
    assert "head:1" in join_cluster("head:1", tmp_path / "key", lambda: "unasked")
    join_cluster("head:1", None, lambda: f" {KEY} ")
    assert joined == [(key, "head:1"), (KEY, "head:1")]
    assert cluster_folder().key.read_text() == KEY


def test_a_cluster_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "stop", lambda _: True)
    assert stop_cluster() == "this machine is in no cluster any more"
