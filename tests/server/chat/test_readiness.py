from dataclasses import replace
from typing import Any, cast

import numpy as np

from engine.client import EngineClient, TokenStream
from engine.errors import EngineDeadError
from engine.types import EngineStats, FinishReason, TokenEvent
from server.chat.readiness import generates
from tests.server.harness import DEADLINE_S
from tests.server.streams import Batches, PreparedClient, fault, token

SILENCE: Batches = [[]] * 3


async def generates_token(client: PreparedClient, timeout_s: float = DEADLINE_S) -> bool:
    return await generates(cast(EngineClient, client), timeout_s)


async def test_a_token_within_the_time_is_a_sign_of_life() -> None:
    client = PreparedClient([*SILENCE, [token(5)]])
    assert await generates_token(client)
    assert client.streams[0].closed
    assert client.streams[0].request.params.max_tokens == 1


async def test_a_fault_is_no_sign_of_life() -> None:
    client = PreparedClient([[fault()]])
    assert not await generates_token(client)


async def test_tokens_of_others_are_a_sign_of_life_while_it_waits() -> None:
    class Busy(PreparedClient):
        def submit(self, *arguments: Any, **options: Any) -> TokenStream:
            self.stats = EngineStats(generated_tokens=1)
            return super().submit(*arguments, **options)

    client = Busy([*SILENCE])
    assert await generates_token(client)
    assert client.streams[0].closed


async def test_a_vector_is_one_where_there_are_no_tokens() -> None:
    event = TokenEvent(1, None, FinishReason.STOP, embedding=np.ones(3, np.float32))
    client = PreparedClient([*SILENCE, [event]])
    client.limits = replace(client.limits, embedding_size=3)
    assert await generates_token(client)
    assert client.streams[0].request.pooling
    assert client.streams[0].request.params.max_tokens == 0


async def test_silence_until_the_time_is_over_is_none() -> None:
    client = PreparedClient([])
    assert not await generates_token(client, 1e-9)
    assert client.streams[0].closed


async def test_an_engine_that_has_ended_gives_none() -> None:
    class Dead(PreparedClient):
        def submit(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise EngineDeadError

    assert not await generates_token(Dead([]))
