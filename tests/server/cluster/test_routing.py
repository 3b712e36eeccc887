"""Requests find their replicas."""

import asyncio
import pickle

from server.cluster.messages import Route
from server.cluster.replica_loads import Load
from server.cluster.routing import Routing

HASHES = [bytes([n]) * 32 for n in range(8)]
IDLE = Load(0, 0, 10, 10, 100.0)


def route(without: frozenset[str] = frozenset()) -> Route:
    return Route(HASHES, 8 * 16 + 4, 16, without)


async def test_a_prefix_is_found_again_and_forgotten_when_it_was_evicted() -> None:
    routing = Routing()
    routing.update({"a": {"load": IDLE}, "b": {"load": IDLE}})
    first = route()
    chosen = routing.choose(first)
    assert chosen is not None
    first.started()
    first.finished(HASHES)
    await asyncio.sleep(0)
    assert first.reason == "new"
    again = route()
    assert routing.choose(again) == chosen
    assert again.reason == "prefix"
    again.finished()
    await asyncio.sleep(0)
    report = {"load": IDLE, "evicted": list(enumerate(HASHES))}
    routing.update({"a": report, "b": report})
    routing.update({"a": report, "b": report})
    last = route()
    routing.choose(last)
    assert last.reason == "new"


async def test_a_replica_that_refused_is_not_chosen_again() -> None:
    routing = Routing()
    routing.update({"a": {}, "b": {}})
    asked = route()
    first, second = routing.choose(asked), routing.choose(asked)
    assert {first, second} == {"a", "b"}
    assert routing.choose(asked) is None
    assert routing.choose(route(frozenset("ab"))) is None


async def test_a_question_reaches_the_replica_that_it_is_for() -> None:
    routing = Routing()
    assert routing.choose(Route()) is None
    routing.update({"a": {}, "b": {}})
    question = Route(target="b")
    assert routing.choose(question) == "b"
    assert question.replicas == ("a", "b")
    assert routing.choose(Route(target="c")) is None
    assert routing.choose(Route()) in ("a", "b")


def test_nothing_of_a_route_is_sent() -> None:
    sent: Route = pickle.loads(pickle.dumps(route()))
    assert sent.hashes == ()
    sent.started()
    sent.finished()
