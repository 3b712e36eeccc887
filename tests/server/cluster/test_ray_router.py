"""Ray's router of requests, over modules called as Ray's are."""

import asyncio
import importlib
from typing import Any

import pytest

from server.cluster.messages import Route
from tests.server.cluster import fake_ray

MODULE = "server.cluster.ray_router"


@pytest.fixture
def router_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = {"PendingRequest": object, "RunningReplica": object}
    fake_ray.install(
        monkeypatch,
        ray={},
        ray__serve={},
        ray__serve__request_router={"RequestRouter": fake_ray.RequestRouter, **names},
    )
    fake_ray.forget(monkeypatch, MODULE)
    return importlib.import_module(MODULE).PrefixRequestRouter


async def test_the_replica_that_holds_the_prefix_is_the_only_candidate(router_class: Any) -> None:
    router = router_class()
    router.initialize_state(max_hashes=100)
    replicas = [fake_ray.replica("a"), fake_ray.replica("b", {})]
    router.update_replicas(replicas)
    assert router.curr == replicas
    hashes = [b"1", b"2", b"3"]
    request = fake_ray.pending(Route(hashes, 60, 16))
    first = await router.choose_replicas(replicas, request)
    assert request.routing_context.should_backoff
    request.args[0].finished(hashes)
    await asyncio.sleep(0)
    assert len(first[0]) == 1
    again = fake_ray.pending(Route(hashes, 60, 16))
    assert await router.choose_replicas(replicas, again) == first
    nowhere = fake_ray.pending(Route(target="c"))
    assert await router.choose_replicas(replicas, nowhere) == [[]]
