"""A replica around a real engine, as Ray starts, asks and ends it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineClient
from engine.types import Request, SamplingParams
from server.cli.serve_models import plain_settings
from server.config import Config, StartError
from server.protocol.wire_errors import REPLICA_LOST, REPLICAS_FULL
from server.ray import replica
from server.ray.replica import (
    EngineReplica,
    Replica,
    check_alike,
    facts_of,
    own_name,
    why_not_here,
)
from server.ray.replica_calls import Route
from server.text.grammar.grammar_errors import GrammarError
from tests.engines import recall_client
from tests.models import write_embedding_model
from tests.server.ray import fake_ray
from tests.server.ray.local_replicas import NoGrammars, sent_form

PROMPT = tuple(range(64))
SETTINGS = plain_settings(
    Config.model_validate(
        {
            "cache": {"kv_budget": "16MiB", "kv_backend": "posix"},
            "engine": {"threads": 1},
            "log": {"level": "error"},
        }
    )
)


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "version", lambda name: f"{name} 1")


@pytest.fixture
def head(tiny_model: Path) -> Any:
    return facts_of(tiny_model)


@pytest.fixture
def made(tiny_model: Path, head: Any) -> Iterator[Replica]:
    one = Replica(str(tiny_model), SETTINGS, head, "one")
    yield one
    one.__del__()


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    started = recall_client(prefix_keep_s=1000.0)
    started.attach()
    yield started
    assert started.stop(10.0)


def replica_of(client: EngineClient) -> EngineReplica:
    return EngineReplica("one", client, NoGrammars(), 5.0)


async def test_a_replica_answers_and_says_how_it_is(made: Replica) -> None:
    await made.check_health()
    await made.check_health()
    submission = Request((1, 2, 3), (SamplingParams(4, temperature=0.0),))
    batches = [batch async for batch in made.generate(Route(), submission)]
    assert sum(len(batch) for batch in batches if isinstance(batch, list)) == 4
    assert (await made.report(Route())).name == "one"
    assert (await made.memory_map(Route())).stats.generated_tokens >= 4
    made.__del__()
    with pytest.raises(RuntimeError, match="does not generate"):
        await made.check_health()


async def test_a_model_of_vectors_is_served_without_grammars(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path / "model")
    one = Replica(str(folder), SETTINGS, facts_of(folder), "one")
    submission = Request((1, 2, 3), (SamplingParams(0),), pooling=True)
    await one.check_health()
    events = [
        event
        async for batch in one.generate(Route(), submission)
        if isinstance(batch, list)
        for _, event in batch
    ]
    assert events[-1].embedding is not None
    one.__del__()


def test_a_machine_that_is_unlike_is_refused(tiny_model: Path, head: Any) -> None:
    other = {**head, "quire": "2"}
    with pytest.raises(StartError, match="quire is quire 1"):
        Replica(str(tiny_model), SETTINGS, other, "one")
    assert "quire is quire 1" in why_not_here(str(tiny_model), SETTINGS, other)
    assert why_not_here(str(tiny_model), SETTINGS, head) == ""


def test_a_model_that_does_not_fit_is_said(tiny_model: Path, head: Any) -> None:
    small = {**SETTINGS, "cache": {**SETTINGS["cache"], "kv_budget": 1}}
    assert why_not_here(str(tiny_model), small, head) != ""


def test_a_replica_is_called_as_ray_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    context = fake_ray.replica("abc")
    serve = {"get_replica_context": lambda: context}
    fake_ray.install(monkeypatch, ray={}, ray__serve=serve)
    assert own_name() == "abc"


def test_one_that_did_not_start_has_nothing_to_end() -> None:
    Replica.__new__(Replica).__del__()
    assert replica.Replica is Replica


async def test_an_answer_begins_with_a_sign_of_life_and_leaving_it_aborts(
    client: EngineClient,
) -> None:
    stream = replica_of(client).generate(Route(), Request(PROMPT, (SamplingParams(300),)))
    assert await anext(stream) == []
    assert await anext(stream) != []
    await stream.aclose()
    async with asyncio.timeout(10):
        while client.in_flight:
            await asyncio.sleep(0.01)


async def test_a_request_without_room_is_refused(client: EngineClient) -> None:
    many = Request(PROMPT, (SamplingParams(5),) * (client.capacity + 1))
    said = [batch async for batch in replica_of(client).generate(Route(), many)]
    assert said == [[], REPLICAS_FULL]


async def test_a_form_that_cannot_be_enforced_here_is_answered_with_an_error(
    client: EngineClient,
) -> None:
    grammars = NoGrammars()
    grammars.failure = GrammarError("too much")
    one = EngineReplica("one", client, grammars, 5.0)
    held = Request(PROMPT, (SamplingParams(5),) * 2, constraint=sent_form(""))
    first, events = [batch async for batch in one.generate(Route(), held)]
    assert first == []
    assert isinstance(events, list)
    assert [number for number, _ in events] == [0, 1]
    assert all("too much" in str(event.message) for _, event in events)


async def test_a_form_that_holds_answers_to_nothing_is_compiled_here(
    client: EngineClient,
) -> None:
    grammars = NoGrammars()
    one = EngineReplica("one", client, grammars, 5.0)
    free = Request(PROMPT, (SamplingParams(5),), constraint=sent_form("so far"))
    batches = [batch async for batch in one.generate(Route(), free)]
    assert sum(len(batch) for batch in batches if isinstance(batch, list)) == 5
    assert grammars.asked == ["so far"]


async def test_a_request_to_an_engine_that_has_ended_is_refused() -> None:
    ended = recall_client()
    ended.attach()
    assert ended.stop(10.0)
    one = Request(PROMPT, (SamplingParams(5),))
    assert [batch async for batch in replica_of(ended).generate(Route(), one)] == [
        [],
        REPLICA_LOST,
    ]


def test_machines_with_the_same_files_and_versions_are_alike(tiny_model: Path, head: Any) -> None:
    check_alike("here", head, facts_of(tiny_model))
    assert head["ray"] == "ray 1"
    for name in head:
        with pytest.raises(StartError, match=f"here is not like the head.*{name} is .* other"):
            check_alike("here", head, {**head, name: "other"})
