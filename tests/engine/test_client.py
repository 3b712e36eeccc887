"""The crossing between the engine's thread and the event loop."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.client import EngineClient, Slots, TokenStream
from engine.types import (
    EngineDeadError,
    FinishReason,
    PrefixSalt,
    PromptTooLongError,
    QueueFullError,
    Request,
    SamplingParams,
    ShareFullError,
    TokenEvent,
)
from tests.engines import (
    SHAPE,
    VOCAB,
    greedy,
    recall_client,
    recall_loop,
    request_of,
    started,
    submit,
)
from tests.recall import RecallModel, recall_many

WAIT_S = 10.0


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    started = recall_client()
    started.attach()
    yield started
    assert started.stop(WAIT_S)


def params(max_tokens: int = 10) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0.0)


async def read(stream: TokenStream) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while batch := await stream.next_batch(WAIT_S):
        events += batch
    return events


async def settled(client: EngineClient) -> None:
    """Until nothing is live or waits."""
    async with asyncio.timeout(WAIT_S):
        while not _empty(client):
            await asyncio.sleep(0.005)


def _empty(client: EngineClient) -> bool:
    kv = client.stats.kv
    return client.in_flight == 0 and kv is not None and kv.live_bytes + kv.quarantined_bytes == 0


async def test_many_streams_get_their_own_tokens(client: EngineClient) -> None:
    asked = [list(range(n, 3 * n)) for n in range(1, 30)]
    streams = [submit(client, tuple(ids), params()) for ids in asked]
    for ids, events in zip(asked, await asyncio.gather(*map(read, streams)), strict=True):
        want = recall_many(ids, 10, len(SHAPE.layers), VOCAB)
        assert [e.token_id for e in events] == want
        assert [e.finish for e in events[-2:]] == [None, FinishReason.LENGTH]
    assert client.in_flight == 0


async def test_a_closed_stream_aborts_its_request_and_frees_its_memory(
    client: EngineClient,
) -> None:
    stream = submit(client, tuple(range(100)), params(300))
    await stream.next_batch(WAIT_S)
    stream.close()
    stream.close()
    await settled(client)


async def test_waiting_for_events_has_a_limit() -> None:
    stream = TokenStream(request_of(1, PROMPT, params()), 1, _unwanted, 9, asyncio.Event())
    assert await stream.next_batch(0.001) == []


async def test_fault_01_a_prompt_that_can_never_fit_is_refused_at_once(
    client: EngineClient,
) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        submit(client, tuple(range(400)), params())
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (400, 400)
    assert client.in_flight == 0


async def test_fault_26_the_queue_is_bounded_and_the_canary_goes_beyond_it(
    client: EngineClient,
) -> None:
    streams = [submit(client, tuple(range(300)), params(90)) for _ in range(8 + 64)]
    with pytest.raises(QueueFullError):
        submit(client, (1,), params())
    canary = submit(client, (0,), params(1), priority=-1, beyond_queue=True)
    assert (await read(canary))[-1].finish is FinishReason.LENGTH
    for stream in streams:
        stream.close()
    await settled(client)
    assert len(await read(submit(client, (1,), params(3)))) == 3


# --- choices ---------------------------------------------------------------------------------

PROMPT = tuple(range(20))


async def test_choices_are_answers_to_one_request(client: EngineClient) -> None:
    salt = PrefixSalt(b"tenant", b"client")
    asked = (params(3), params(5), params(4))
    streams = client.submit(Request(PROMPT, asked, priority=2, salt=salt))
    (r,) = {id(stream.request): stream.request for stream in streams}.values()
    first = r.request_id
    assert [stream.answer_id for stream in streams] == [first, first + 1, first + 2]
    assert (r.prompt_ids, r.params, r.priority, r.salt) == (PROMPT, asked, 2, salt)
    want = recall_many(PROMPT, 5, len(SHAPE.layers), VOCAB)
    for stream_params, events in zip(asked, await asyncio.gather(*map(read, streams)), strict=True):
        assert [e.token_id for e in events] == want[: stream_params.max_tokens]
    assert submit(client, (1,), params(1)).answer_id == first + 3
    await settled(client)


async def test_answers_to_two_prompts_are_read_together(client: EngineClient) -> None:
    (first,) = client.submit(Request((1, 2), (SamplingParams(3),)))
    (second,) = client.submit(Request((3, 4), (SamplingParams(5),)), first)
    counts = [0, 0]
    while any(batches := await TokenStream.next_batches((first, second), WAIT_S)):
        for number, batch in enumerate(batches):
            counts[number] += len(batch)
    assert counts == [3, 5]


async def test_one_wake_up_brings_what_came_for_all() -> None:
    wake = asyncio.Event()
    request = request_of(0, PROMPT, *[params()] * 3)
    one, two, three = (TokenStream(request, n, _unwanted, 9, wake) for n in range(3))
    reading = asyncio.ensure_future(TokenStream.next_batches((one, two), WAIT_S))
    await asyncio.sleep(0)
    three.deliver(TokenEvent(2, 5))
    await asyncio.sleep(0.01)
    assert not reading.done()  # what woke it was for somebody else
    one.deliver(TokenEvent(0, 6))
    two.deliver(TokenEvent(1, 7))
    assert await reading == [[TokenEvent(0, 6)], [TokenEvent(1, 7)]]
    assert await three.next_batch(WAIT_S) == [TokenEvent(2, 5)]
    assert await TokenStream.next_batches((one, two), 0.001) == [[], []]


async def test_choices_are_closed_one_by_one(client: EngineClient) -> None:
    streams = client.submit(Request(PROMPT, (params(200),) * 3))
    streams[0].close()
    streams[2].close()
    events = await read(streams[1])
    assert len(events) == 200
    await settled(client)


async def test_one_tenant_leaves_room_for_others_and_gets_its_places_back() -> None:
    client = started(
        lambda emit: recall_loop(emit, max_num_seqs=2),
        max_queue=4,
        max_backlog=400,
        max_share_ratio=0.5,
    )
    client.attach()
    assert (client.capacity, client.slots.max_share) == (6, 3)
    one, other = PrefixSalt(b"one"), PrefixSalt(b"other")
    held = client.submit(Request(PROMPT, (params(300),) * 3, salt=one))
    with pytest.raises(ShareFullError):
        submit(client, PROMPT, params(), salt=PrefixSalt(b"one", b"in disguise"))
    client.slots.check(3, b"other")
    held.append(submit(client, PROMPT, params(), salt=one, beyond_queue=True))
    held += client.submit(Request(PROMPT, (params(300),) * 2, salt=other))
    with pytest.raises(QueueFullError):
        submit(client, PROMPT, params(), salt=other)
    for stream in held:
        stream.close()
    await settled(client)
    client.slots.check(3, b"one")
    assert not client.slots._taken
    assert client.stop(20)


def test_a_share_is_one_slot_at_least() -> None:
    assert Slots(0.01, lambda: 10).max_share == 1


async def test_choices_enter_the_queue_together_or_not_at_all() -> None:
    client = started(lambda emit: recall_loop(emit, max_num_seqs=2), max_queue=3, max_backlog=9)
    client.attach()
    assert client.capacity == 5
    held = client.submit(Request(PROMPT, (params(300),) * 3))
    client.slots.check(2, b"")
    with pytest.raises(QueueFullError):
        client.slots.check(3, b"")
    with pytest.raises(QueueFullError):
        client.submit(Request(PROMPT, (params(),) * 3))
    assert client.in_flight == 3
    held += client.submit(Request(PROMPT, (params(),) * 2))
    with pytest.raises(QueueFullError):
        submit(client, PROMPT, params())
    for stream in held:
        stream.close()
    await settled(client)
    assert client.stop(WAIT_S)


def _unwanted(_: int) -> None:
    raise AssertionError("nobody has closed it")


# --- ends ------------------------------------------------------------------------------------


async def test_a_reader_that_never_comes_ends_its_own_request() -> None:
    client = EngineClient(recall_loop, max_queue=4, max_backlog=5)
    client.start()
    client.attach()
    slow = submit(client, (1, 2, 3), params(200))
    other = submit(client, (4, 5), params(3))
    assert len(await read(other)) == 3
    await settled(client)
    events = await read(slow)
    assert events[-1].finish is FinishReason.ERROR
    assert events[-1].message == "the reader is too slow"
    assert len(events) <= 6
    assert client.stop(WAIT_S)


async def test_fault_11_a_dead_engine_ends_all_streams_and_refuses_new_ones() -> None:
    client = recall_client(
        model=lambda shape, vocab: RecallModel(shape, vocab, failing_tokens=frozenset({900}))
    )
    client.attach()
    healthy = submit(client, tuple(range(300)), params(90))
    await read(submit(client, (900,), params()))
    await read(submit(client, (900,), params()))
    async with asyncio.timeout(WAIT_S):
        while client.alive:
            await asyncio.sleep(0.005)
    with pytest.raises(EngineDeadError):
        submit(client, (900,), params())
    assert not client.alive
    assert (await read(healthy))[-1].finish is FinishReason.ERROR
    assert client.stop(WAIT_S)


async def test_fault_12_an_assertion_is_told_with_counts_and_without_contents(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = recall_client()
    client.attach()
    assert client._loop is not None
    stream = submit(client, (777,) * 100, params(300))
    await stream.next_batch(WAIT_S)
    with caplog.at_level("ERROR"):
        client._loop._kv._open[stream.answer_id].progress.computed = 999
        assert (await read(stream))[-1].finish is FinishReason.ERROR
        assert client.stop(WAIT_S)
    assert not client.alive
    assert "AssertionError" in caplog.text
    assert "EngineStats(running=1" in caplog.text
    assert "777, 777" not in caplog.text


async def test_all_requests_can_be_ended_with_a_reason(client: EngineClient) -> None:
    streams = [submit(client, tuple(range(300)), params(90)) for _ in range(12)]
    client.end_all("because")
    for stream in streams:
        events = await read(stream)
        assert (events[-1].finish, events[-1].message) == (FinishReason.ERROR, "because")
    await settled(client)
    assert client.alive
    with pytest.raises(EngineDeadError):
        submit(client, (1,), params())


async def test_fault_26_ids_are_made_here_and_none_is_given_twice(client: EngineClient) -> None:
    streams = [submit(client, (1, 2), params(1)) for _ in range(20)]
    streams += client.submit(Request((1, 2), (params(1),) * 8))
    ids = [stream.answer_id for stream in streams]
    assert ids == sorted(set(ids))
    for stream in streams:
        assert len(await read(stream)) == 1


async def test_stopping_ends_what_still_runs() -> None:
    client = recall_client()
    client.attach()
    stream = submit(client, tuple(range(300)), params(90))
    assert client.stop(WAIT_S)
    assert (await read(stream))[-1].message == "the engine has ended"
    assert not client.alive


def test_what_building_raises_is_raised_where_the_engine_is_started() -> None:
    def build(_: object) -> None:
        raise ValueError("no such weights")

    client = EngineClient(build, max_queue=1, max_backlog=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no such weights"):
        client.start()
    assert not client.alive
    assert client.stop(WAIT_S)


def test_before_the_start_there_are_no_figures_and_nothing_is_alive() -> None:
    client = EngineClient(recall_loop, max_queue=1, max_backlog=1)
    assert not client.alive
    assert client.stats.kv is None
    assert (client.busy_since, client.step_age_s) == (None, 0.0)
    with pytest.raises(EngineDeadError):
        submit(client, (1,), params())


async def test_events_of_a_request_that_nobody_made_are_dropped(client: EngineClient) -> None:
    assert client._loop is not None
    client._loop.mailbox.put(greedy(10**6, [1], 2))
    assert len(await read(submit(client, (1,), params(3)))) == 3


def test_events_without_an_event_loop_are_dropped() -> None:
    client = recall_client()
    assert client._loop is not None
    client._loop.mailbox.put(greedy(1, [1], 2))
    assert client.stop(WAIT_S)


def test_events_for_a_closed_event_loop_are_dropped() -> None:
    client = recall_client()

    async def attach() -> None:
        client.attach()
        submit(client, tuple(range(300)), params(90))

    asyncio.run(attach())
    assert client.stop(WAIT_S)
