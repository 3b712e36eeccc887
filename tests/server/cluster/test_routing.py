"""Requests find their replicas."""

import asyncio
import pickle
from dataclasses import replace

from server.cluster.messages import Route
from server.cluster.replica_loads import Load
from server.cluster.routing import FIRST_SPEED, Routing, with_all_speeds

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


async def test_a_model_that_needs_states_is_found_where_they_are_reported() -> None:
    routing = Routing()
    routing.update({"a": {"load": IDLE}, "b": {"load": IDLE}})

    def asked() -> Route:
        return Route(HASHES, 8 * 16 + 4, 16, ends=[3, 8])

    first = asked()
    chosen = routing.choose(first)
    first.started()
    first.finished(HASHES)
    await asyncio.sleep(0)
    for number in range(1, 6):
        states = number, HASHES[:2]
        routing.update(
            {name: {"load": IDLE} | ({} if name == chosen else {"states": states}) for name in "ab"}
        )
    again = asked()
    assert routing.choose(again) == chosen
    again.finished()
    routing.update({name: {"load": IDLE, "states": (7, HASHES[:2])} for name in "ab"})
    await asyncio.sleep(0)
    last = asked()
    assert routing.choose(last) in ("a", "b")
    assert last.reason == "prefix"
    assert routing._router is not None
    choice = routing._router.choose(HASHES, 8 * 16 + 4)
    assert choice is not None
    assert choice.matched_blocks == 8, "what has just been sent is expected"


def test_replicas_whose_speed_is_not_known_are_taken_for_as_fast_as_the_fastest() -> None:
    slow, fast, new = (replace(IDLE, speed=speed) for speed in (100.0, 300.0, 0.0))
    found = with_all_speeds({"a": slow, "b": fast, "c": new})
    assert [load.speed for load in found.values()] == [100.0, 300.0, 300.0]
    assert with_all_speeds({"c": new})["c"].speed == FIRST_SPEED
    assert with_all_speeds({}) == {}
