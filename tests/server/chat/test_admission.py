from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from engine.client import EngineClient, TokenStream
from engine.types import EngineDeadError, EngineStats, FinishReason, SamplingParams, TokenEvent
from server.chat.admission import generates
from server.protocol.wire_errors import ApiError
from server.text.tokenizer import Tokenizer
from tests.engines import submit
from tests.server.harness import DEADLINE_S, make_service, start_engine
from tests.server.streams import Batches, PreparedClient, fault, token

NOBODY = b""


def test_answers_that_never_fit_are_refused_and_those_that_do_not_now_are_put_off(
    tokenizer: Tokenizer,
) -> None:
    engine = start_engine(max_num_seqs=1, max_queue=2)
    admission = make_service(engine.client, tokenizer).admission
    admission.check_answers(NOBODY, 3)
    with pytest.raises(ApiError) as caught:
        admission.check_answers(NOBODY, 4)
    assert (caught.value.status, caught.value.param) == (400, "n")
    assert (
        caught.value.message == "n is 4; this server has room for 3 answers to one client at most."
    )
    with pytest.raises(ApiError) as caught:
        admission.check_answers(NOBODY, 1, prompts=4)
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    admission.check_answers(NOBODY, 1, prompts=3)
    submit(engine.client, (1, 2), SamplingParams(max_tokens=9))
    admission.check_answers(NOBODY, 2)
    admission.check_answers(NOBODY, 1, prompts=2)
    for choices, prompts in ((3, 1), (1, 3)):
        with pytest.raises(ApiError) as caught:
            admission.check_answers(NOBODY, choices, prompts)
        assert caught.value.status == 429
    engine.stop()


SILENCE: Batches = [[]] * 3


async def generates_token(client: PreparedClient, timeout_s: float = DEADLINE_S) -> bool:
    return await generates(cast(EngineClient, client), timeout_s)


async def test_a_token_within_the_time_is_a_sign_of_life() -> None:
    client = PreparedClient([*SILENCE, [token(5)]])
    assert await generates_token(client)
    assert client.streams[0].closed
    assert client.streams[0].request.params[0].max_tokens == 1


async def test_a_fault_is_no_sign_of_life() -> None:
    client = PreparedClient([[fault()]])
    assert not await generates_token(client)


async def test_tokens_of_others_are_a_sign_of_life_while_it_waits() -> None:
    class Busy(PreparedClient):
        def submit(self, *arguments: Any) -> Sequence[TokenStream]:
            self.stats = EngineStats(generated_tokens=1)
            return super().submit(*arguments)

    client = Busy([*SILENCE])
    assert await generates_token(client)
    assert client.streams[0].closed


async def test_a_vector_is_one_where_there_are_no_tokens() -> None:
    event = TokenEvent(1, None, FinishReason.STOP, embedding=np.ones(3, np.float32))
    client = PreparedClient([*SILENCE, [event]])
    client.limits = replace(client.limits, embedding_size=3)
    assert await generates_token(client)
    assert client.streams[0].request.pooling
    assert client.streams[0].request.params[0].max_tokens == 0


async def test_silence_until_the_time_is_over_is_none() -> None:
    client = PreparedClient([])
    assert not await generates_token(client, 1e-9)
    assert client.streams[0].closed


async def test_an_engine_that_has_ended_gives_none() -> None:
    class Dead(PreparedClient):
        def submit(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise EngineDeadError

    assert not await generates_token(Dead([]))
