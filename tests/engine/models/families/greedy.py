"""What every family must show: greedy answers equal mlx-lm's, alone, together and over a prefix."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.step.loop import EngineLoop
from engine.types import SamplingParams
from tests.engines import CONFIG, Answers, built_loop, request_of, run_dry
from tests.models import SMALL, write_model
from tests.reference import load_reference

SPEC = replace(SMALL, vocab_size=1024)
LENGTHS = (1, 63, 64, 65, 300, 600)
NEW_TOKENS = 24
# An answer that says one token again and again would prove little.
LEAST_DISTINCT = 16
STORAGES: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "bits": 4}]
# A head of its own and how weights are stored are the same code in every family: one tries all.
TIED_OR_PACKED = [(True, STORAGES[0]), (False, STORAGES[1])]
GREEDY = SamplingParams(NEW_TOKENS, temperature=0.0)
ENGINE = replace(
    CONFIG,
    page_bytes=None,
    heap_bytes=1 << 20,
    kv_budget_bytes=None,
    kv_dtype="float32",
    max_model_len=1024,
    max_num_batched_tokens=128,
    threads=2,
    prefix_keep_s=1000.0,
    overlap=True,
)


def check_by_reference(
    checkpoint: Checkpoint, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """mlx-lm's own model, in float32, says each token of an answer after those before it: so it
    would give the same answer by itself."""
    model = load_reference(checkpoint)
    for ids, answer in zip(prompts, answers, strict=True):
        logits = model(mx.array([[*ids, *answer[:-1]]]))[0, len(ids) - 1 :]
        assert mx.argmax(logits.astype(mx.float32), axis=-1).tolist() == answer


def answers_of(
    loop: EngineLoop, answers: Answers, prompts: dict[int, list[int]], new_tokens: int = NEW_TOKENS
) -> None:
    """Until all are answered. prompts: by the request's number."""
    params = replace(GREEDY, max_tokens=new_tokens)
    for number, ids in prompts.items():
        loop.mailbox.put(request_of(number, tuple(ids), params))
    run_dry(loop)


def check_greedy_answers(
    folder: Path,
    *,
    tied: bool,
    lengths: Sequence[int] = LENGTHS,
    seed: int = 11,
    new_tokens: int = NEW_TOKENS,
    least_distinct: int = LEAST_DISTINCT,
    renamed: Callable[[Path], object] = lambda _: None,
    **how: Any,
) -> None:
    """Packed, as quire serves on a CPU. lengths: of prompts. new_tokens: of each answer.
    least_distinct: tokens that differ. renamed: gives the weights of a folder other names. how: as
    for write_model."""
    spec = replace(SPEC, tie_word_embeddings=tied)
    renamed(write_model(folder, spec, seed=seed, gain=3.0, **how))
    checkpoint = read_checkpoint(folder)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, SPEC.vocab_size, length).tolist() for length in lengths]
    answers = Answers.empty()
    loop = built_loop(folder, ENGINE, answers)
    answers_of(loop, answers, dict(enumerate(prompts, start=1)), new_tokens)
    expected = [answers.tokens[number] for number in range(1, 1 + len(prompts))]
    assert min(len(set(answer)) for answer in expected) >= least_distinct
    assert {len(answer) for answer in expected} == {new_tokens}
    check_by_reference(checkpoint, prompts, expected)
    before = loop._scheduler.counters.cached_prompt_tokens
    for number, ids in enumerate(prompts, start=101):
        answers_of(loop, answers, {number: ids}, new_tokens)
    assert [answers.tokens[number] for number in range(101, 101 + len(prompts))] == expected
    # The second time, what is shared was computed in company.
    shared = loop._scheduler.counters.cached_prompt_tokens - before
    loop.close()
    assert shared > sum(lengths) // 2
