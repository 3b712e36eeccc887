"""Several engines as one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.types import (
    BlockHashes,
    EngineDeadError,
    EngineLimits,
    FinishReason,
    PrefixSalt,
    PromptTooLongError,
    QueueFullError,
    Request,
    TokenEvent,
)
from server.chat.admission import generates
from server.protocol.wire_errors import REPLICA_LOST, REPLICAS_FULL, SHUTTING_DOWN
from server.ray.remote_engine import RemoteEngine, routed_text
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.worker import GrammarsFullError
from tests.engine.test_client import params, read
from tests.engines import SHAPE, VOCAB, submit
from tests.recall import recall_many
from tests.server.harness import eventually
from tests.server.ray.local_replicas import LocalReplicas, sent_form, shared

WAIT_S = 10.0
SILENCE_S = 1.5
PROMPT = tuple(range(100, 180))


@asynccontextmanager
async def engine_of(replicas: LocalReplicas, **options: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(replicas, silence_s=SILENCE_S, report_period_s=0.05, **options)
    await engine.ready()
    try:
        yield engine
    finally:
        engine.end_all(SHUTTING_DOWN)
        await asyncio.sleep(0.01)
        replicas.stop()


def tokens(events: list[TokenEvent]) -> list[int | None]:
    return [event.token_id for event in events]


def want(prompt: tuple[int, ...], count: int) -> list[int]:
    return recall_many(list(prompt), count, len(SHAPE.layers), VOCAB)


async def test_answers_are_those_of_an_engine_and_follow_their_prefix() -> None:
    replicas = LocalReplicas(3, prefix_keep_s=1000.0)
    async with engine_of(replicas) as engine:
        first = await read(submit(engine, PROMPT, params()))
        assert tokens(first) == want(PROMPT, 10)
        assert first[-1].finish is FinishReason.LENGTH
        longer = (*PROMPT, *(id_ for id_ in tokens(first) if id_ is not None), 7, 8, 9)
        second = await read(submit(engine, longer, params()))
        assert tokens(second) == want(longer, 10)
        assert replicas.chosen[0] == replicas.chosen[1]
        assert second[0].prefix is not None
        assert second[0].prefix.cached_tokens >= 80
        assert engine.in_flight == 0


async def test_several_answers_to_a_prompt_come_from_one_replica() -> None:
    async with engine_of(LocalReplicas(2)) as engine:
        streams = engine.submit(Request(PROMPT, (params(), params(5))))
        both = await asyncio.gather(*map(read, streams))
        assert [tokens(events) for events in both] == [want(PROMPT, 10), want(PROMPT, 5)]
        assert [its.answer_id for its in streams] == [events[0].request_id for events in both]


async def test_vectors_come_as_they_are() -> None:
    async with engine_of(LocalReplicas(1, pools=True)) as engine:
        events = await read(submit(engine, PROMPT, params(0), pooling=True))
        assert events[-1].embedding is not None
        assert engine.limits.embedding_size == VOCAB


async def test_a_replica_that_hangs_is_left_out_and_another_one_answers() -> None:
    replicas = LocalReplicas(2)
    async with engine_of(replicas) as engine:
        await eventually(lambda: len(engine.members.alive) == 2)
        replicas.hung = {"r0"}
        salts = [PrefixSalt(bytes([n])) for n in range(4)]
        streams = [submit(engine, PROMPT, params(), salt=salt) for salt in salts]
        for events in await asyncio.gather(*map(read, streams)):
            assert tokens(events) == want(PROMPT, 10)
        assert engine.members.retries > 0
        await eventually(lambda: [member.name for member in engine.members.alive] == ["r1"])
        replicas.hung = set()
        await eventually(lambda: len(engine.members.alive) == 2)


async def test_an_answer_whose_replica_is_lost_ends_with_an_error() -> None:
    replicas = LocalReplicas(2)
    async with engine_of(replicas) as engine:
        replicas.dies_after = 1
        events = await read(submit(engine, PROMPT, params(300)))
        assert events[-1].finish is FinishReason.ERROR
        assert events[-1].message == REPLICA_LOST
        assert len(replicas.chosen) == 1
        assert engine.in_flight == 0


async def test_where_all_replicas_are_gone_a_request_ends_and_nobody_is_let_in() -> None:
    replicas = LocalReplicas(2)
    async with engine_of(replicas) as engine:
        replicas.dead = {"r0", "r1"}
        events = await read(submit(engine, PROMPT, params()))
        assert [event.message for event in events] == [REPLICA_LOST]
        replicas.update()
        await eventually(lambda: not engine.members.alive)
        with pytest.raises(QueueFullError):
            submit(engine, PROMPT, params())
        assert engine.alive
        assert engine.limits.max_model_len > 0
        with pytest.raises(EngineDeadError):
            await engine.memory_map()


async def test_a_replica_whose_engine_has_ended_is_left_out() -> None:
    replicas = LocalReplicas(2)
    async with engine_of(replicas) as engine:
        await eventually(lambda: len(engine.members.alive) == 2)
        assert replicas.client("r0").stop(WAIT_S)
        salts = [PrefixSalt(bytes([n])) for n in range(4)]
        streams = [submit(engine, PROMPT, params(), salt=salt) for salt in salts]
        for events in await asyncio.gather(*map(read, streams)):
            assert tokens(events) == want(PROMPT, 10)


@asynccontextmanager
async def full_engine(count: int) -> AsyncIterator[tuple[LocalReplicas, RemoteEngine]]:
    """An engine whose replicas are all full."""
    replicas = LocalReplicas(count)
    async with engine_of(replicas) as engine:
        await eventually(lambda: len(engine.members.alive) == count)
        replicas.grammars.failure = GrammarsFullError()
        yield replicas, engine


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
async def test_a_full_replica_gives_way_to_another_until_all_stay_full(count: int) -> None:
    async with full_engine(count) as (replicas, engine):
        events = await read(submit(engine, PROMPT, params(), constraint=sent_form("begun")))
        assert [event.message for event in events] == [REPLICAS_FULL]
        assert len(set(replicas.chosen[:count])) == len(set(replicas.chosen)) == count
        assert replicas.grammars.asked[0] == "begun"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
async def test_a_prompt_waits_for_a_slot_while_all_replicas_are_full(count: int) -> None:
    async with full_engine(count) as (replicas, engine):
        stream = submit(engine, PROMPT, params(), constraint=sent_form("begun"))
        await eventually(lambda: len(replicas.chosen) > 2 * count)
        replicas.grammars.failure = None
        assert (await read(stream))[-1].finish is FinishReason.LENGTH


async def test_a_form_that_cannot_be_enforced_there_ends_the_request() -> None:
    replicas = LocalReplicas(1)
    async with engine_of(replicas) as engine:
        replicas.grammars.failure = GrammarError("it is too much")
        constraint = sent_form("")
        (event,) = await read(submit(engine, PROMPT, params(), constraint=constraint))
        assert event.message is not None
        assert "too much" in event.message


async def test_room_is_that_of_all_replicas_and_has_shares() -> None:
    async with engine_of(LocalReplicas(2), max_share_ratio=0.5) as engine:
        await eventually(lambda: len(engine.members.alive) == 2)
        assert engine.capacity == 2 * (8 + 64)
        assert engine.slots.max_share == 72
        with pytest.raises(QueueFullError):
            engine.slots.check(145, b"")
        with pytest.raises(QueueFullError):
            engine.slots.check(73, b"")
        engine.slots.check(72, b"")
        with pytest.raises(PromptTooLongError):
            submit(engine, tuple(range(1000)), params())


async def test_a_reader_that_leaves_aborts_its_answer() -> None:
    replicas = LocalReplicas(1)
    async with engine_of(replicas) as engine:
        one, other = engine.submit(Request(PROMPT, (params(300), params(5))))
        await one.next_batch(WAIT_S)
        one.close()
        one.close()
        assert engine.in_flight == 1
        assert tokens(await read(other)) == want(PROMPT, 5)
        alone = submit(engine, PROMPT, params(300))
        await alone.next_batch(WAIT_S)
        alone.close()
        await eventually(lambda: replicas.client("r0").in_flight == 0)
        assert engine.in_flight == 0


async def test_the_end_ends_all_requests_and_lets_none_in() -> None:
    async with engine_of(LocalReplicas(1)) as engine:
        stream = submit(engine, PROMPT, params(300))
        await stream.next_batch(WAIT_S)
        engine.end_all(SHUTTING_DOWN)
        assert (await read(stream))[-1].message == SHUTTING_DOWN
        assert not engine.alive
        with pytest.raises(EngineDeadError):
            submit(engine, PROMPT, params())


async def test_an_end_before_the_beginning_ends_nothing() -> None:
    replicas = LocalReplicas(1)
    engine = RemoteEngine(replicas)
    engine.end_all(SHUTTING_DOWN)
    replicas.stop()


async def test_figures_are_those_of_all_replicas() -> None:
    async with engine_of(LocalReplicas(2)) as engine:
        await eventually(lambda: len(engine.members.alive) == 2)
        assert engine.pressure == 0
        assert engine.step_age_s >= 0
        assert engine.limits.max_num_seqs == 16
        await read(submit(engine, PROMPT, params()))
        await eventually(lambda: engine.stats.generated_tokens >= 10)
        assert (await engine.memory_map()).kv.groups
        assert await generates(engine, WAIT_S)


async def test_a_stream_that_ends_before_its_answers_is_of_a_lost_replica() -> None:
    replicas = LocalReplicas(2)
    async with engine_of(replicas) as engine:
        replicas.dies_after, replicas.ends_early = 1, True
        assert (await read(submit(engine, PROMPT, params(300))))[-1].message == REPLICA_LOST


async def test_where_none_can_be_chosen_a_request_ends() -> None:
    replicas = LocalReplicas(2)
    async with engine_of(replicas) as engine:
        await eventually(lambda: len(engine.members.alive) == 2)
        replicas.dead = {"r0", "r1"}
        replicas.update()
        assert (await read(submit(engine, PROMPT, params())))[-1].message == REPLICA_LOST
        assert replicas.chosen == []


async def test_a_prompt_is_given_to_three_lost_replicas_at_most() -> None:
    replicas = LocalReplicas(4)
    async with engine_of(replicas) as engine:
        await eventually(lambda: len(engine.members.alive) == 4)
        assert all(client.stop(WAIT_S) for client in replicas.clients)
        events = await read(submit(engine, PROMPT, params()))
        assert [event.message for event in events] == [REPLICA_LOST]
        assert len(set(replicas.chosen)) == len(replicas.chosen) == 3


async def test_an_answer_that_nobody_reads_may_end_before_others() -> None:
    async with engine_of(LocalReplicas(1)) as engine:
        one, other = engine.submit(Request(PROMPT, (params(5), params(30))))
        one.close()
        assert tokens(await read(other)) == want(PROMPT, 30)
        unread = submit(engine, PROMPT, params(5))
        await eventually(lambda: engine.in_flight == 0)
        unread.close()
        assert engine.in_flight == 0


async def test_the_memory_of_an_engine_that_has_ended_is_not_known() -> None:
    replicas = LocalReplicas(1)
    async with engine_of(replicas) as engine:
        assert replicas.client("r0").stop(WAIT_S)
        with pytest.raises(EngineDeadError):
            await engine.memory_map()


async def test_nobody_is_known_as_long_as_there_is_nobody() -> None:
    replicas = LocalReplicas(1)
    replicas.dead = {"r0"}
    replicas.update()
    engine = RemoteEngine(replicas, silence_s=0.1)
    await engine.ask_all()
    assert engine.members.names == ()
    replicas.stop()


def test_equal_prefixes_of_one_tenant_are_equal_texts() -> None:
    limits = EngineLimits(1000, 8, VOCAB, shared_block_tokens=16)

    def text(prompt: tuple[int, ...], tenant: bytes = b"") -> str:
        return routed_text(Request(prompt, (params(),), salt=PrefixSalt(tenant)), limits)

    one, other = text(PROMPT), text((*PROMPT[:40], *range(60)))
    assert (len(one), len(other)) == (5, 6)
    assert shared(one, other) == 2
    assert one.encode().decode() == one
    assert text(PROMPT, b"another")[0] != one[0]
    assert text(PROMPT[:15]) == ""
    assert routed_text(Request(PROMPT, (params(),)), EngineLimits(1000, 8, VOCAB)) == ""


async def test_texts_are_made_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()
    extend = BlockHashes.extend

    def noted(its: BlockHashes, token_ids: Sequence[int], start: int) -> None:
        if token_ids == PROMPT:
            threads.append(threading.current_thread())
        extend(its, token_ids, start)

    async with engine_of(LocalReplicas(1)) as engine:
        monkeypatch.setattr(BlockHashes, "extend", noted)
        await read(submit(engine, PROMPT, params()))
    assert threads
    assert threading.main_thread() not in threads[:1]
