"""Calls by Ray's handle."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.types import Request, SamplingParams, TokenEvent
from server.ray.replica_calls import RayReplicas, Route

SUBMISSION = Request((1,), (SamplingParams(1),))


class Response:
    """What a handle returns: it may be awaited, or iterated."""

    def __init__(self, batches: list[Any], *, hangs: bool) -> None:
        self.batches = batches
        self.hangs = hangs
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def _answer(self) -> Any:
        if self.hangs:
            await asyncio.sleep(3600)
        return self.batches[0]

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        for batch in self.batches:
            yield batch
        if self.hangs:
            await asyncio.sleep(3600)


class Handle:
    """A DeploymentHandle, as far as it is used."""

    def __init__(self, batches: list[Any], *, hangs: bool = False) -> None:
        self.response = Response(batches, hangs=hangs)
        self.calls: list[tuple[object, ...]] = []
        self.method = "generate"

    def options(self, *, stream: bool = False, method_name: str = "generate") -> "Handle":
        self.method = method_name
        return self

    @property
    def generate(self) -> "Handle":
        return self

    def remote(self, *arguments: object) -> Response:
        self.calls.append((self.method, *arguments))
        return self.response


async def test_what_a_replica_says_is_passed_on() -> None:
    event = TokenEvent(1, 7)
    handle = Handle([[], [(0, event)]])
    route = Route()
    said = [batch async for batch in RayReplicas(handle).generate(route, SUBMISSION)]
    assert said == [[], [(0, event)]]
    assert handle.calls == [("generate", route, SUBMISSION)]
    assert not handle.response.is_cancelled


async def test_leaving_early_cancels_the_call() -> None:
    handle = Handle([[], []])
    stream = RayReplicas(handle).generate(Route(), SUBMISSION)
    await anext(stream)
    await stream.aclose()
    assert handle.response.is_cancelled


async def test_a_reader_that_is_cancelled_cancels_the_call() -> None:
    handle = Handle([], hangs=True)
    stream = RayReplicas(handle).generate(Route(), SUBMISSION)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(stream)
    assert handle.response.is_cancelled


@pytest.mark.parametrize("method", ["report", "memory_map"])
async def test_questions_are_asked_and_cancelled(method: str) -> None:
    handle = Handle(["how it is"])
    assert await RayReplicas(handle).ask(method, Route()) == "how it is"
    assert handle.calls[0][0] == method
    hanging = Handle([], hangs=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await RayReplicas(hanging).ask(method, Route())
    assert hanging.response.is_cancelled
