"""Every call of the backend fails once: SQLite's way.

For N = 1, 2, ... the N-th call is refused, until a run has fewer calls than that. Each time: a
clean end for every request, the books right, memory back where it was, the next request right.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import engine.build
from engine.step.loop import EngineLoop
from engine.types import FinishReason, Request, SamplingParams
from kvcache.backends.backend import PageBackend
from kvcache.backends.choice import KVBackend
from kvcache.backends.new import new_backends
from kvcache.layout import Group
from tests.engine.test_recall_engine import assert_empty
from tests.engines import (
    BLOCK_BYTES,
    SHAPE,
    VOCAB,
    Answers,
    greedy,
    recall_loop,
    request_of,
    run_dry,
)
from tests.recall import recall_many

LAYERS = len(SHAPE.layers)
REFUSED_TICKET = -1
REFUSABLE = ("add_heap", "add_buffer", "map")


class FailingBackend:
    """A real backend, of whose calls that a system may refuse one is refused."""

    def __init__(self, backend: PageBackend) -> None:
        self._backend = backend
        self.calls = 0
        self.fail_at = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if name not in REFUSABLE:
            return value
        return lambda *arguments: not self._is_refused() and value(*arguments)

    def _is_refused(self) -> bool:
        self.calls += 1
        return self.calls == self.fail_at

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        if not self._is_refused():
            return self._backend.map_ahead(buffer, block, heap, heap_block, count)
        return REFUSED_TICKET

    def wait(self, ticket: int, timeout_s: float) -> bool:
        return ticket == REFUSED_TICKET or self._backend.wait(ticket, timeout_s)

    def refused(self, ticket: int) -> bool:
        return ticket == REFUSED_TICKET or self._backend.refused(ticket)


def failing_loop(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> tuple[EngineLoop, FailingBackend]:
    made: list[FailingBackend] = []

    def make(kv_backend: KVBackend, groups: Sequence[Group], **how: Any) -> Any:
        made.extend(map(FailingBackend, new_backends(kv_backend, groups, **how)))
        return made

    monkeypatch.setattr(engine.build, "new_backends", make)
    loop = recall_loop(answers, kv_budget_bytes=16 * BLOCK_BYTES, max_num_seqs=3, max_model_len=200)
    return loop, made[0]


def requests() -> list[Request]:
    """A prefix that is shared, a fork, and enough tokens for evictions and preemptions."""
    prefix = list(range(500, 548))
    params = SamplingParams(40, temperature=0.0)
    return [
        request_of(1, (7,) * 40, params, params),
        greedy(3, [*prefix, 1], 60),
        greedy(4, [*prefix, 2], 60),
        greedy(5, [9] * 100, 40),
    ]


def test_fault_04_every_refusal_ends_cleanly_and_the_next_request_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers.empty()
    loop, backend = failing_loop(answers, monkeypatch)
    numbers = itertools.count(1)
    refused = 0
    for fail_at in itertools.count(1):
        answers.tokens.clear()
        answers.finished.clear()
        backend.calls, backend.fail_at = 0, fail_at
        first = next(numbers) * 100
        asked = [replace(each, request_id=first + each.request_id) for each in requests()]
        for request in asked:
            loop.mailbox.put(request)
        run_dry(loop)
        for request, number in ((each, number) for each in asked for number in each.answer_ids):
            want = recall_many(request.prompt_ids, request.params[0].max_tokens, LAYERS, VOCAB)
            got = answers.tokens.get(number, [])
            assert got == want[: len(got)], f"call {fail_at}"
            end = answers.finished[number]
            assert (end is FinishReason.LENGTH) == (len(got) == len(want))
            assert end in (FinishReason.LENGTH, FinishReason.ERROR)
        assert_empty(loop)
        if backend.calls < fail_at:
            break
        refused += 1
    assert refused > 20
    assert loop._kv.copied_bytes > 0, "the fork was meant to copy"
    assert loop._scheduler.counters.preemptions > 0
    assert loop._scheduler.counters.cached_prompt_tokens > 0
