"""What is deployed, over modules called as Ray's are."""

import importlib
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from server.cli.cluster_folder import ClusterError
from server.config import Config
from server.ray.machines import ReplicaCounts
from tests.server.ray import fake_ray


class State(Enum):
    RUNNING = "RUNNING"


MODULE = "server.ray.application"
NODES = [
    {"NodeID": "n1", "NodeManagerHostname": "one", "Alive": True},
    {"NodeID": "n2", "NodeManagerHostname": "two", "Alive": True},
    {"NodeID": "n3", "NodeManagerHostname": "gone", "Alive": False},
]


class Answer:
    def __init__(self, *values: Any) -> None:
        self._values = list(values)

    def remote(self, *_: object) -> "Answer":
        return self

    def result(self) -> Any:
        return self._values.pop(0) if len(self._values) > 1 else self._values[0]


@dataclass
class Ray:
    """What the modules do, and what was asked of them."""

    deployed: dict[str, dict[str, Any]] = field(default_factory=dict)
    bound: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    connected: list[dict[str, Any]] = field(default_factory=list)
    is_down: bool = False
    failure: Exception | None = None
    applications: dict[str, Any] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)

    def init(self, **options: Any) -> None:
        if self.is_down:
            raise ConnectionError("nobody there")
        self.connected.append(options)

    def remote(self, function: Any) -> Any:
        def options(*, num_cpus: int, scheduling_strategy: str) -> Any:
            return Answer(self.unfit.get(scheduling_strategy, ""))

        return SimpleNamespace(options=options)

    def deployment(self, target: type, *, name: str, **options: Any) -> Any:
        assert "version" not in options, "Ray refuses it there"
        self.deployed[name] = options

        def bind(*arguments: Any) -> str:
            self.bound[name] = arguments
            return name

        def with_version(*, version: str, _internal: bool) -> Any:
            options["version"] = version
            return SimpleNamespace(bind=bind)

        return SimpleNamespace(options=with_version)

    def run(self, target: Any, **_: object) -> Any:
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(url=Answer("", "http://here"))

    def modules(self) -> dict[str, dict[str, Any]]:
        context = SimpleNamespace(get_node_id=lambda: "n1")
        return {
            "ray": {
                "init": self.init,
                "shutdown": lambda: self.connected.append({"shutdown": True}),
                "nodes": lambda: NODES,
                "remote": self.remote,
                "get": lambda answers, timeout: [its.result() for its in answers],
                "get_runtime_context": lambda: context,
            },
            "ray__serve": {
                "start": lambda **_: None,
                "deployment": self.deployment,
                "run": self.run,
                "delete": self.deleted.append,
                "status": lambda: SimpleNamespace(applications=self.applications),
                "get_app_handle": lambda _: SimpleNamespace(drain=Answer(None)),
            },
            "ray__serve__config": {
                "RequestRouterConfig": dict,
                "AutoscalingConfig": dict,
            },
            "ray__serve__schema": {"LoggingConfig": dict},
            "ray__util": {},
            "ray__util__scheduling_strategies": {
                "NodeAffinitySchedulingStrategy": lambda node, soft: node
            },
        }


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    found = Ray()
    fake_ray.install(monkeypatch, **found.modules())
    fake_ray.forget(monkeypatch, MODULE)
    return found


@pytest.fixture
def application(ray: Ray) -> Any:
    return importlib.import_module(MODULE)


def plan(application: Any) -> Any:
    settings = Config.model_validate(
        {
            "access": {"api_keys": ["sk-0123456789abcdef"]},
            "limits": {"max_request_s": 3600},
            "server": {"drain_s": 20},
            "engine": {"max_num_seqs": 20},
        }
    )
    return application.Plan("demo", settings, "/settings", {}, 1)


def test_one_ingress_on_the_head_and_replicas_where_they_fit(ray: Ray, application: Any) -> None:
    ray.unfit = {"n2": "too small"}
    made = plan(application)
    assert application.unfit_machines(made, ["n1", "n2"]) == {"n2": "too small"}
    assert application.deploy(made, ReplicaCounts(1, 1), ["n2"]) == "http://here"
    replica, ingress = ray.deployed["replica"], ray.deployed["ingress"]
    assert replica["ray_actor_options"]["label_selector"] == {"ray.io/node-id": "!in(n2)"}
    assert replica["max_replicas_per_node"] == replica["num_replicas"] == 1
    assert ingress["ray_actor_options"]["label_selector"] == {"ray.io/node-id": "n1"}
    assert ray.bound["ingress"] == ("replica", "demo", "/settings")
    assert "sk-0123" not in str(ray.bound["replica"])
    application.resize(made, ReplicaCounts(2, 2), [])
    assert ray.deployed["replica"]["ray_actor_options"]["label_selector"] == {}


def test_need_decides_between_two_numbers_and_who_goes_may_end_its_answers(
    ray: Ray, application: Any
) -> None:
    application.deploy(plan(application), ReplicaCounts(1, 3), [])
    replica, ingress = ray.deployed["replica"], ray.deployed["ingress"]
    assert "num_replicas" not in replica
    config = replica["autoscaling_config"]
    assert (config["min_replicas"], config["max_replicas"]) == (1, 3)
    assert config["target_ongoing_requests"] == 18.0
    assert replica["graceful_shutdown_timeout_s"] == 3600.0
    assert ingress["graceful_shutdown_timeout_s"] == 20.0
    assert ingress["version"] == replica["version"]


def test_what_does_not_start_is_taken_back(ray: Ray, application: Any) -> None:
    ray.failure = RuntimeError("no room")
    with pytest.raises(ClusterError, match="no room"):
        application.deploy(plan(application), ReplicaCounts(1, 1), [])
    assert ray.deleted == ["quire"]


def test_whoever_is_connected_leaves_in_the_end(ray: Ray, application: Any) -> None:
    with application.connected("head:1"):
        assert ray.connected[0]["address"] == "head:1"
    assert ray.connected[-1] == {"shutdown": True}
    ray.is_down = True
    with pytest.raises(ClusterError, match="nobody there"), application.connected("head:1"):
        pass


def test_the_end_is_that_of_what_is_there(ray: Ray, application: Any) -> None:
    application.end()
    assert ray.deleted == []
    ray.applications = {"quire": object()}
    application.end()
    assert ray.deleted == ["quire"]


def test_the_status_counts_machines_and_replicas(ray: Ray, application: Any) -> None:
    assert application.status() == "machines: one, two\nnothing is served"
    state = SimpleNamespace(replica_states={State.RUNNING: 2})
    found = SimpleNamespace(
        status=SimpleNamespace(value="RUNNING"), message="", deployments={"replica": state}
    )
    ray.applications = {"quire": found}
    assert application.status() == "machines: one, two\nserving: running\nreplicas: 2 running"
    found.deployments, found.status, found.message = {}, "UNHEALTHY", "why"
    assert application.status().endswith("serving: unhealthy\nreplicas: none\nwhy")
