"""Ray's router of prefixes as we use it, over modules called as Ray's are."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from server.ray.replica_calls import Route
from tests.server.ray import fake_ray

MODULE = "server.ray.router"


class PrefixCacheAffinityRouter:
    """Ray's, as far as ours calls it: chooses what it is told to, or the first that it may."""

    def __init__(self, *names: str) -> None:
        self.curr_replicas = {its.replica_id: its for its in map(fake_ray.replica, names)}
        self.options: dict[str, Any] = {}
        self.smallest: list[Any] = []

    def initialize_state(self, **options: Any) -> None:
        self.options = options

    async def choose_replicas(self, candidates: list[Any], pending: Any) -> list[list[Any]]:
        text = self.text_of(pending)
        allowed = self.apply_locality_routing(pending)  # type: ignore[attr-defined]
        found = [its for its in candidates if its.replica_id in allowed][:1]
        return [self.smallest or found] if text or found else []

    async def _choose_replica_for_request(self, pending: Any, *, is_retry: bool) -> Any:
        found = await self.choose_replicas([*self.curr_replicas.values()], pending)
        return found[0][0]

    async def replica_for(self, pending: Any) -> Any:
        """As Ray asks its subclass."""
        return await self._choose_replica_for_request(pending, is_retry=False)

    def text_of(self, pending: Any) -> Any:
        return self._extract_text_from_request(pending)  # type: ignore[attr-defined]


class TreeActor:
    """Ray's PrefixTreeActor."""

    given: dict[str, Any]

    @classmethod
    def options(cls, **given: Any) -> "type[TreeActor]":
        cls.given = given
        return cls

    @classmethod
    def remote(cls) -> str:
        return "the tree"


@pytest.fixture
def router_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    package = "ray__llm___internal__serve__routing_policies__prefix_aware"
    names = {"PendingRequest": object, "RunningReplica": object, "ReplicaID": object}
    context = SimpleNamespace(get_node_id=lambda: "n1")
    modules: dict[str, dict[str, Any]] = {
        "ray": {"get_runtime_context": lambda: context},
        f"{package}__prefix_aware_router": {"PrefixCacheAffinityRouter": PrefixCacheAffinityRouter},
        f"{package}__prefix_tree": {"PrefixTreeActor": TreeActor},
        "ray__serve": {},
        "ray__serve__request_router": names,
        "ray__util": {},
        "ray__util__scheduling_strategies": {
            "NodeAffinitySchedulingStrategy": lambda node, soft: node
        },
    }
    fake_ray.install(monkeypatch, **modules)
    fake_ray.forget(monkeypatch, MODULE)
    return importlib.import_module(MODULE).PrefixRouter


async def chosen(router: Any, route: Route) -> str:
    found = await router.replica_for(fake_ray.pending(route))
    name: str = found.replica_id.unique_id
    assert route.replica == name
    return name


def test_its_tree_is_on_its_own_machine_and_begins_anew(router_class: Any) -> None:
    router = router_class()
    router.initialize_state()
    assert router.options["tree_actor"] == "the tree"
    assert router.options["imbalanced_threshold"] == 16
    assert TreeActor.given["scheduling_strategy"] == "n1"


async def test_a_replica_that_did_not_take_a_call_is_not_chosen_again(router_class: Any) -> None:
    router, route = router_class("b", "a", "c"), Route("text")
    assert await chosen(router, route) == "b"
    assert route.replicas == ("a", "b", "c")
    assert await chosen(router, route) == "a"
    assert route.without == {"b"}


async def test_a_call_of_one_replica_goes_there_or_nowhere(router_class: Any) -> None:
    router = router_class("a", "b")
    assert await chosen(router, Route(target="b")) == "b"
    request = fake_ray.pending(Route(target="c"))
    assert await router.choose_replicas([*router.curr_replicas.values()], request) == [[]]
    assert request.routing_context.should_backoff


async def test_where_ray_would_take_one_that_is_left_out_all_others_are_asked(
    router_class: Any,
) -> None:
    router = router_class("a", "b", "c")
    every = [*router.curr_replicas.values()]
    router.smallest = every[:1]
    request = fake_ray.pending(Route("text", without=frozenset({"a"})))
    assert await router.choose_replicas(every, request) == [every[1:]]


def test_a_prompt_without_a_full_block_is_compared_with_nothing(router_class: Any) -> None:
    text = router_class().text_of
    assert text(fake_ray.pending(Route())) is None
    assert text(fake_ray.pending(Route("text"))) == "text"
