"""Whole engines on RecallModel: every token proves what stands behind the addresses."""

import random
import time
from collections.abc import Iterator

import mlx.core as mx
import pytest

from engine.messages import Abort
from engine.step.loop import EngineLoop
from engine.types import FinishReason, Request, SamplingParams
from kvcache.backends.backend import Segment
from kvcache.layout import KVFormat, KVShape, KVSpec
from tests.engines import BLOCK_BYTES, SHAPE, VOCAB, Answers, greedy, recall_loop, run_dry, steps
from tests.kvcache.managers import full_group
from tests.recall import WrongSlotError, recall, recall_many

LAYERS = len(SHAPE.layers)
# Rows and pages of the second kind are twice as large.
TWO_KINDS = KVShape((KVSpec(2, 32, KVFormat.FLOAT32), KVSpec(1, 128, KVFormat.FLOAT32)))
WAIT_S = 10.0


def prompts(count: int, longest: int, seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    for _ in range(count):
        yield [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]


def assert_empty(loop: EngineLoop) -> None:
    """Nothing is live, nothing waits, and when prefixes are forgotten all memory but one heap is
    back with the system."""
    kv = loop._kv
    deadline = time.monotonic() + WAIT_S
    while True:
        kv.evict_prefixes()
        kv.release_idle_memory()
        stats = kv.stats()
        waiting = stats.quarantined_bytes + stats.cached_bytes
        if waiting == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.001)
    assert stats.live_bytes == stats.quarantined_bytes == stats.mapped_ahead_bytes == 0
    assert stats.num_sequences == 0
    assert stats.committed_bytes <= kv._layout.heap_bytes
    kv.check_invariants()


@pytest.mark.parametrize("format", [KVFormat.BFLOAT16, KVFormat.FLOAT32])
def test_ragged_company_changes_no_token(format: KVFormat) -> None:
    answers = Answers.empty()
    shape = KVShape.uniform(2, KVSpec(2, 32, format))
    loop = recall_loop(answers, shape=shape, kv_budget_bytes=64 * BLOCK_BYTES)
    asked = dict(enumerate(prompts(20, 150, seed=1), start=1))
    for number, ids in asked.items():
        loop.mailbox.put(greedy(number, ids, 15))
    run_dry(loop)
    for number, ids in asked.items():
        assert answers.tokens[number] == recall_many(ids, 15, LAYERS, VOCAB)
        assert answers.finished[number] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("seed", "shape"), [*((seed, SHAPE) for seed in range(6)), (6, TWO_KINDS), (7, TWO_KINDS)]
)
def test_joins_leaves_and_aborts_at_random_change_no_token(seed: int, shape: KVShape) -> None:
    rng = random.Random(seed)
    answers = Answers.empty()
    loop = recall_loop(
        answers,
        shape=shape,
        page_bytes=None,
        kv_budget_bytes=rng.choice([28, 40, 64]) * 16 * shape.bytes_per_token,
        max_num_batched_tokens=rng.choice([8, 33, 64]),
        free_slack_bytes=rng.choice([0, 4, 16]) * BLOCK_BYTES,
    )
    asked: dict[int, tuple[list[int], int]] = {}
    aborted = set()
    for number, ids in enumerate(prompts(40, 120, seed), start=1):
        asked[number] = (ids, rng.randint(1, 60))
        loop.mailbox.put(greedy(number, *asked[number]))
        if rng.random() < 0.3:
            victim = rng.randint(1, number)
            aborted.add(victim)
            loop.mailbox.put(Abort(victim))
        for _ in range(rng.randint(0, 12)):
            loop.run_once()
    run_dry(loop)
    for number, (ids, count) in asked.items():
        want = recall_many(ids, count, LAYERS, VOCAB)
        got = answers.tokens.get(number, [])
        assert got == want[: len(got)]
        if answers.finished[number] is FinishReason.ABORTED:
            assert number in aborted
        else:
            assert got == want
    assert_empty(loop)


def test_one_missing_block_costs_one_sequence_its_place() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, kv_budget_bytes=28 * BLOCK_BYTES, max_model_len=300)
    for number in range(1, 9):
        loop.mailbox.put(greedy(number, list(range(number, number + 30)), 60))
    lost: list[int] = []
    for _ in steps(loop):
        lost.append(loop._scheduler.counters.preemptions - sum(lost))
    assert sum(lost) > 0
    assert max(lost) == 1
    assert set(answers.finished.values()) == {FinishReason.LENGTH}


def test_no_k_or_v_byte_is_copied_when_a_sequence_joins_grows_or_leaves() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers)
    for number, ids in enumerate(prompts(20, 150, seed=3), start=1):
        loop.mailbox.put(greedy(number, ids, 20))
        loop.run_once()
    run_dry(loop)
    assert loop.stats.copied_bytes == 0
    assert len(answers.finished) == 20


def test_recall_notices_a_slot_that_was_overwritten() -> None:
    """The oracle can fail: one wrong slot in the past of a sequence is named."""
    loop = recall_loop(Answers.empty())
    loop.mailbox.put(greedy(1, list(range(40)), 50))
    loop.run_once()
    loop.run_once()
    kv = loop._kv
    buffer = full_group(kv)._open[1].buffer.number
    wrong = mx.full((1, SHAPE.layers[0].kv_heads, SHAPE.layers[0].head_dim), 99.0)
    rows = full_group(kv).backend.rows([Segment(buffer, 3, 1)])
    mx.eval(rows.append(mx.zeros((1,)), kv._layers[1], wrong, wrong, wrong, None))
    with pytest.raises(WrongSlotError, match="layer 1 keys slot 3"):
        loop.run_once()


def test_recall_notices_another_token_at_a_place() -> None:
    tokens = [1, 2, 3, 4]
    assert recall(tokens, LAYERS, 1 << 40) != recall([1, 2, 9, 4], LAYERS, 1 << 40)
    assert recall(tokens, LAYERS, 1 << 40) != recall([2, 1, 3, 4], LAYERS, 1 << 40)


# --- shared prefixes ------------------------------------------------------------------------------


def test_sharers_of_a_prefix_read_what_their_own_prompts_say() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers)
    prefix = list(range(200, 280))
    asked = {number: [*prefix, *[number] * number] for number in range(1, 9)}
    for number, ids in asked.items():
        loop.mailbox.put(greedy(number, ids, 30))
    run_dry(loop)
    for number, ids in asked.items():
        assert answers.tokens[number] == recall_many(ids, 30, LAYERS, VOCAB)
    assert loop.stats.cached_prompt_tokens == 7 * 80
    assert loop.stats.copied_bytes == 0
    assert_empty(loop)


def test_forks_read_what_their_parent_wrote_and_the_copy_is_counted() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers)
    prompt = tuple(range(300, 345))  # two blocks and 13 tokens
    params = SamplingParams(30, temperature=1.0)
    loop.mailbox.put(Request(prompt, (params,) * 5, request_id=1))
    run_dry(loop)
    for number in range(1, 6):
        assert answers.finished[number] is FinishReason.LENGTH
    assert loop.stats.copied_bytes == 4 * 12 * SHAPE.bytes_per_token
    assert_empty(loop)


def test_a_conversation_computes_each_turn_once() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, prefix_keep_s=1000.0)
    conversation = list(range(60))
    for number in range(1, 5):
        loop.mailbox.put(greedy(number, conversation, 24))
        run_dry(loop)
        want = recall_many(conversation, 24, LAYERS, VOCAB)
        assert answers.tokens[number] == want
        conversation = [*conversation, *want, *[number] * 5]
    assert loop.stats.prompt_tokens < 60 + 3 * (16 + 6)
