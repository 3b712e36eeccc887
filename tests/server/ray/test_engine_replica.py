"""One engine of a cluster."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.client import EngineClient
from engine.types import SamplingParams, Submission
from server.ray.engine_replica import EngineReplica
from server.ray.messages import Refusal, SentForm
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from tests.engines import recall_client
from tests.server.ray.local_replicas import NoGrammars

PROMPT = tuple(range(64))


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    started = recall_client(prefix_keep_s=1000.0)
    started.attach()
    yield started
    assert started.stop(10.0)


def replica_of(client: EngineClient) -> EngineReplica:
    return EngineReplica("one", "here", client, NoGrammars(), 5.0)


async def test_an_answer_begins_with_a_sign_of_life_and_leaving_it_aborts(
    client: EngineClient,
) -> None:
    stream = replica_of(client).generate(Submission(PROMPT, (SamplingParams(300),)))
    assert await anext(stream) == []
    assert await anext(stream) != []
    await stream.aclose()
    async with asyncio.timeout(10):
        while client.in_flight:
            await asyncio.sleep(0.01)


async def test_a_request_without_room_is_refused(client: EngineClient) -> None:
    many = Submission(PROMPT, (SamplingParams(5),) * (client.capacity + 1))
    said = [batch async for batch in replica_of(client).generate(many)]
    assert said == [[], Refusal.FULL]


async def test_a_form_that_cannot_be_enforced_here_is_answered_with_an_error(
    client: EngineClient,
) -> None:
    grammars = NoGrammars()
    grammars.failure = GrammarError("too much")
    replica = EngineReplica("one", "here", client, grammars, 5.0)
    held = Submission(PROMPT, (SamplingParams(5),) * 2, constraint=SentForm(ConstraintSpec(), ""))
    first, events = [batch async for batch in replica.generate(held)]
    assert first == []
    assert isinstance(events, list)
    assert [number for number, _ in events] == [0, 1]
    assert all("too much" in str(event.message) for _, event in events)


async def test_a_form_that_holds_answers_to_nothing_is_compiled_here(
    client: EngineClient,
) -> None:
    grammars = NoGrammars()
    replica = EngineReplica("one", "here", client, grammars, 5.0)
    free = Submission(PROMPT, (SamplingParams(5),), constraint=SentForm(ConstraintSpec(), "so far"))
    batches = [batch async for batch in replica.generate(free)]
    assert sum(len(batch) for batch in batches if isinstance(batch, list)) == 5
    assert grammars.asked == ["so far"]


async def test_a_request_to_an_engine_that_has_ended_is_refused() -> None:
    ended = recall_client()
    ended.attach()
    assert ended.stop(10.0)
    one = Submission(PROMPT, (SamplingParams(5),))
    assert [batch async for batch in replica_of(ended).generate(one)] == [[], Refusal.ENDED]
