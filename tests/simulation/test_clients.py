"""Whatever a client should not get is noticed."""

import asyncio

import pytest

from engine.client import TokenStream
from engine.types import FinishReason, Request, SamplingParams, TokenEvent
from tests.simulation.clients import Client
from tests.simulation.faults import SimulationError
from tests.simulation.recall import Recall

VOCAB = 100
PROMPT = (1, 2, 3)
ANSWER = Recall(PROMPT, 5, VOCAB).tokens(8)[3:]


def client(max_tokens: int = 4, max_model_len: int = 50, stops: set[int] | None = None) -> Client:
    params = SamplingParams(max_tokens, seed=5, stop_token_ids=frozenset(stops or ()))
    request = Request(1, PROMPT, params)
    stream = TokenStream(request, lambda _: None, 3, asyncio.Event())
    return Client(request, Recall(PROMPT, 5, VOCAB), stream, max_model_len, 3, 1, None)


def token(number: int, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(1, ANSWER[number], finish)


def test_an_answer_is_right_token_by_token_until_its_end() -> None:
    asker = client()
    for number in range(4):
        event = token(number, FinishReason.LENGTH if number == 3 else None)
        asker.take(event)
        asker.deliver(event)
        asker.read_some(number)
    asker.check_end()
    assert asker.read == asker.answered == 4
    assert asker.tokens == [*PROMPT, *ANSWER[:4]]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([token(1)], "token 0 is"),
        ([token(0), token(0)], "token 1 is"),
        ([token(n) for n in range(4)], r"ends with None, due was FinishReason.LENGTH"),
        ([token(0, FinishReason.LENGTH)], r"ends with FinishReason.LENGTH, due was None"),
        ([token(0, FinishReason.STOP)], r"ends with FinishReason.STOP, due was None"),
        ([TokenEvent(1, None)], "says nothing"),
        ([token(0, FinishReason.ERROR)], r"a token with FinishReason.ERROR"),
        ([TokenEvent(1, None, FinishReason.ABORTED)], "aborted by nobody"),
        ([TokenEvent(1, None, FinishReason.ERROR)] * 2, "after its end"),
    ],
)
def test_a_wrong_event_is_noticed(events: list[TokenEvent], message: str) -> None:
    asker = client()
    for event in events[:-1]:
        asker.take(event)
    with pytest.raises(SimulationError, match=message):
        asker.take(events[-1])


def test_an_answer_ends_at_a_stop_token_and_where_the_context_does() -> None:
    for asker in (client(stops={ANSWER[1]}), client(max_model_len=5)):
        asker.take(token(0))
        with pytest.raises(SimulationError, match="ends with None"):
            asker.take(token(1))


def test_silence_is_noticed() -> None:
    with pytest.raises(SimulationError, match="never ended"):
        client().check_end()
    asker = client()
    asker.take(TokenEvent(1, None, FinishReason.ERROR))
    with pytest.raises(SimulationError, match="waits for ever"):
        asker.check_end()


def test_a_reader_who_misses_a_token_is_noticed() -> None:
    asker = client(max_tokens=2)
    end = token(1, FinishReason.LENGTH)
    for event in (token(0), end):
        asker.take(event)
    asker.deliver(end)
    with pytest.raises(SimulationError, match="token 0 is"):
        asker.check_end()


def test_a_reader_who_hears_another_end_than_the_engine_said_is_noticed() -> None:
    asker = client()
    asker.take(TokenEvent(1, None, FinishReason.ERROR))
    asker.deliver(TokenEvent(1, None, FinishReason.ABORTED))
    with pytest.raises(SimulationError, match="ended differently"):
        asker.check_end()


def test_a_slow_reader_is_cut_and_gets_no_more_than_the_backlog() -> None:
    asker = client(max_tokens=9)
    asker.aborted = True
    for number in range(5):
        asker.take(token(number))
        asker.deliver(token(number))
    asker.take(TokenEvent(1, None, FinishReason.ABORTED))
    asker.check_end()
    assert asker.read == 3
    assert asker.reader_end is FinishReason.ERROR
    assert asker.messages == ["the reader is too slow"]
