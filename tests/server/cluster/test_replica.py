"""One engine of a cluster."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.client import EngineClient
from engine.types import EngineStats, PrefixNews, SamplingParams, Submission
from server.cluster.messages import Refusal
from server.cluster.replica import EngineReplica
from server.cluster.replica_loads import Load
from server.cluster.sent_forms import SentForm
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from tests.engines import BLOCK_BYTES, CONFIG, recall_client
from tests.server.cluster.local_replicas import NoGrammars

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


async def test_what_was_evicted_is_reported_more_than_once_under_the_same_numbers(
    client: EngineClient,
) -> None:
    replica = replica_of(client)
    assert [batch async for batch in replica.generate(Submission(PROMPT, (SamplingParams(5),)))]
    loop = client._loop
    assert loop is not None
    kept = loop._kv.take_prefix_news
    news = [PrefixNews(its, None) for its in ([b"1", b"2"], [], [b"3"], [b"4"], [b"5"])]
    loop._kv.take_prefix_news = lambda: news.pop(0)  # type: ignore[method-assign]
    reports = [await replica.routing_report() for _ in range(5)]
    loop._kv.take_prefix_news = kept  # type: ignore[method-assign]
    assert [report["evicted"] for report in reports] == [
        [(0, b"1"), (1, b"2")],
        [(0, b"1"), (1, b"2")],
        [(0, b"1"), (1, b"2"), (2, b"3")],
        [(0, b"1"), (1, b"2"), (2, b"3"), (3, b"4")],
        [(2, b"3"), (3, b"4"), (4, b"5")],
    ]
    assert "states" not in reports[-1]
    load = reports[-1]["load"]
    assert isinstance(load, Load)
    assert load.total_blocks > load.free_blocks > 0
    assert await replica.generates()


async def test_a_model_with_states_has_all_of_them_in_every_report(client: EngineClient) -> None:
    replica = replica_of(client)
    loop = client._loop
    assert loop is not None
    kept = loop._kv.take_prefix_news
    news = [PrefixNews([], its) for its in ([b"1", b"2"], [], [b"3"])]
    loop._kv.take_prefix_news = lambda: news.pop(0)  # type: ignore[method-assign]
    reports = [await replica.routing_report() for _ in range(3)]
    loop._kv.take_prefix_news = kept  # type: ignore[method-assign]
    states = [report["states"] for report in reports]
    assert states == [(1, [b"1", b"2"]), (2, []), (3, [b"3"])]


async def test_room_that_holds_nothing_counts_heaps_that_are_not_made_yet(
    client: EngineClient,
) -> None:
    load = (await replica_of(client).routing_report())["load"]
    pool = client.stats.kv
    assert isinstance(load, Load)
    assert pool is not None
    assert CONFIG.kv_budget_bytes is not None
    assert load.total_blocks == CONFIG.kv_budget_bytes // BLOCK_BYTES
    made = pool.num_heaps * CONFIG.heap_bytes // BLOCK_BYTES
    assert made < load.free_blocks <= load.total_blocks


async def test_an_engine_without_figures_reports_no_blocks(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineClient, "stats", EngineStats())
    load = (await replica_of(client).routing_report())["load"]
    assert isinstance(load, Load)
    assert load.total_blocks == 0


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
