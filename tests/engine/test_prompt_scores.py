"""Log-probabilities of a prompt equal those of one plain forward, however it was computed."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import engine.step.sampler
from engine.models.checkpoint import read_checkpoint
from engine.step.loop import EngineLoop
from engine.step.plan import (
    RowError,
    Scores,
)
from engine.step.sampler import score
from engine.types import (
    FinishReason,
    SamplingParams,
    TokenEvent,
)
from tests.engines import CONFIG, built_loop, recall_loop, request_of, run_dry, steps
from tests.models import ModelSpec, write_model
from tests.reference import load_reference

SPEC = ModelSpec(vocab_size=1024)
TOLERANCE = 2e-5
LENGTHS = (1, 2, 63, 64, 65, 300)
TOP = 3
ENGINE = replace(
    CONFIG,
    page_bytes=None,
    heap_bytes=1 << 20,
    kv_budget_bytes=None,
    max_model_len=400,
    step_time_target_ms=1e6,
    prefix_keep_s=1000.0,
)
Expected = dict[int, np.ndarray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("scores"), SPEC, seed=5)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """They begin alike, so that what is not shared could be."""
    tokens = np.random.default_rng(2).integers(0, SPEC.vocab_size, max(LENGTHS)).tolist()
    return [tokens[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> Expected:
    """Log-softmax of one forward of the longest prompt, ``[length, vocab]``."""
    model = load_reference(read_checkpoint(folder))
    logits = model(mx.array([prompts[-1]]))[0].astype(mx.float32)
    whole = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    return {len(ids): whole[: len(ids)] for ids in prompts}


def built(folder: Path, events: list[TokenEvent], **changes: object) -> EngineLoop:
    loop = built_loop(folder, replace(ENGINE, **changes), events.extend)  # type: ignore[arg-type]
    events.clear()
    return loop


def check(event: TokenEvent, ids: list[int], whole: np.ndarray, top: int) -> None:
    """The first event of a request has one value for each token of its prompt."""
    assert event.prompt_logprobs is not None
    first, *others = event.prompt_logprobs
    assert first is None
    assert len(others) == len(ids) - 1
    for place, (found, token) in enumerate(zip(others, ids[1:], strict=True)):
        assert found is not None
        assert found.logprob == pytest.approx(whole[place, token], abs=TOLERANCE)
        best = np.sort(whole[place])[::-1][:top]
        assert [value for _, value in found.top] == pytest.approx(best.tolist(), abs=TOLERANCE)
        for other, value in found.top:
            assert value == pytest.approx(whole[place, other], abs=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_they_equal_one_forward_whatever_the_chunks_and_the_company(
    folder: Path, prompts: list[list[int]], expected: Expected, chunk: int
) -> None:
    events: list[TokenEvent] = []
    loop = built(folder, events, max_num_batched_tokens=chunk)
    loop.mailbox.put(request_of(99, tuple(prompts[-1]), SamplingParams(5, temperature=0.0)))
    for number, ids in enumerate(prompts):
        for kind, max_tokens in enumerate((0, 3)):
            params = SamplingParams(max_tokens, temperature=0.0, prompt_logprobs=TOP * kind)
            loop.mailbox.put(request_of(10 * number + kind, tuple(ids), params))
    run_dry(loop)
    for number, ids in enumerate(prompts):
        (only,) = of(events, 10 * number)
        assert (only.token_id, only.finish) == (None, FinishReason.LENGTH)
        assert only.prefix is not None
        assert (only.prefix.cached_tokens, only.prefix.miss) == (0, None)
        check(only, ids, expected[len(ids)], top=0)
        first, *rest = of(events, 10 * number + 1)
        check(first, ids, expected[len(ids)], top=TOP)
        assert first.token_id == expected[len(ids)][-1].argmax()
        assert len(rest) == 2
        assert all(event.prompt_logprobs is None for event in rest)
    assert all(event.prompt_logprobs is None for event in of(events, 99))
    loop.close()


def of(events: Iterable[TokenEvent], request_id: int) -> list[TokenEvent]:
    return [event for event in events if event.request_id == request_id]


def test_what_is_scored_is_not_scored_again_after_preemption(
    folder: Path, prompts: list[list[int]], expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def counted(*args: object) -> list[Scores | RowError]:
        found = score(*args)  # type: ignore[arg-type]
        rows.append(sum(len(each.logprobs) for each in found if isinstance(each, Scores)))
        return found

    monkeypatch.setattr("engine.step.runner.score", counted)
    page_bytes = 4096  # 32 tokens
    block_bytes = 2 * SPEC.num_hidden_layers * page_bytes
    events: list[TokenEvent] = []
    loop = built(
        folder,
        events,
        page_bytes=page_bytes,
        kv_budget_bytes=14 * block_bytes,
        heap_bytes=block_bytes,
        max_num_batched_tokens=8,
    )
    ids = prompts[-1]
    loop.mailbox.put(request_of(1, tuple(ids[100:200]), SamplingParams(90, temperature=0.0)))
    params = SamplingParams(90, temperature=0.0, prompt_logprobs=TOP)
    loop.mailbox.put(request_of(2, tuple(ids), params))
    preempted_at: set[int] = set()
    for _ in steps(loop):
        sequence = loop._scheduler._by_id.get(2)
        if sequence is not None and sequence.preemptions:
            preempted_at.add(len(sequence.scored))
    assert 0 < min(preempted_at) < len(ids) - 1, "it must be preempted halfway"
    check(of(events, 2)[0], ids, expected[len(ids)], top=TOP)
    assert sum(rows) == len(ids) - 1
    loop.close()


def test_a_fork_scores_its_prompt_itself_and_may_have_children_that_do_not(
    folder: Path, prompts: list[list[int]], expected: Expected
) -> None:
    ids = prompts[-1]
    events: list[TokenEvent] = []
    loop = built(folder, events, max_num_batched_tokens=64)
    scored = SamplingParams(4, temperature=0.0, prompt_logprobs=0)
    loop.mailbox.put(request_of(1, ids, scored, scored, replace(scored, prompt_logprobs=None)))
    run_dry(loop)
    for number in (1, 2):
        check(of(events, number)[0], ids, expected[len(ids)], top=0)
    child = of(events, 3)
    assert child[0].prefix is not None
    assert child[0].prefix.cached_tokens > len(ids) // 2
    assert [e.token_id for e in child] == [e.token_id for e in of(events, 1)]
    loop.close()


def test_others_share_what_was_computed_for_scores(folder: Path, prompts: list[list[int]]) -> None:
    events: list[TokenEvent] = []
    loop = built(folder, events, max_num_batched_tokens=64)
    reading = SamplingParams(0, prompt_logprobs=0)
    for number, params in enumerate((reading, SamplingParams(1, temperature=0.0), reading), 1):
        loop.mailbox.put(request_of(number, tuple(prompts[-1]), params))
        run_dry(loop)
    found = [event.prefix.cached_tokens for event in events if event.prefix is not None]
    assert found[0] == found[2] == 0
    assert found[1] > 200
    loop.close()


def test_the_logits_of_no_more_than_some_rows_are_there_at_once(
    folder: Path, prompts: list[list[int]], expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.step.sampler, "SCORED_ROWS_AT_ONCE", 5)
    events: list[TokenEvent] = []
    loop = built(folder, events, max_num_batched_tokens=256)
    model = loop._runner._model  # type: ignore[attr-defined]
    rows: list[int] = []
    head = model.head

    def watched(states: mx.array) -> mx.array:
        rows.append(len(states))
        logits: mx.array = head(states)
        return logits

    model.head = watched
    loop.mailbox.put(request_of(1, tuple(prompts[-1]), SamplingParams(0, prompt_logprobs=1)))
    run_dry(loop)
    check(events[0], prompts[-1], expected[len(prompts[-1])], top=1)
    assert max(rows) == 5
    assert sum(rows) >= len(prompts[-1]) - 1
    loop.close()


@pytest.mark.parametrize("bad", [3, 40])
def test_a_row_that_is_not_finite_ends_its_request_with_an_error(bad: int) -> None:
    from tests.recall import RecallModel

    events: list[TokenEvent] = []
    loop = recall_loop(
        events.extend,
        model=lambda shape, vocab: RecallModel(shape, vocab, non_finite_tokens=frozenset({bad})),
        max_num_batched_tokens=16,
    )
    for number, params in ((1, SamplingParams(0, prompt_logprobs=0)), (2, SamplingParams(1))):
        loop.mailbox.put(request_of(number, tuple(range(50)), params))
    run_dry(loop)
    (event,) = of(events, 1)
    assert event.finish is FinishReason.ERROR
    assert event.message == "the model's output was not finite"
    assert event.prompt_logprobs is None
    assert of(events, 2)[0].finish is FinishReason.LENGTH
    assert loop._scheduler.counters.failed_rows == 1
    loop.close()
