"""Greedy answers equal mlx-lm's token for token: alone, and in each other's company."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.build import build_engine, plan_engine
from engine.client import EngineClient
from engine.machine import MachineMemory
from engine.models.checkpoint import read_checkpoint
from engine.types import SamplingParams
from tests.engine.models.families.greedy import check_by_reference
from tests.engines import CONFIG, ON_CPU, Answers, request_of, run_dry, started, submit
from tests.models import SMALL, write_model

SPEC = replace(SMALL, num_attention_heads=6, vocab_size=1024)
LENGTHS = (1, 2, 63, 64, 65, 400, 1500)
NEW_TOKENS = 24
ENGINE = replace(
    CONFIG,
    page_bytes=None,
    heap_bytes=1 << 20,
    kv_budget_bytes=None,
    max_model_len=None,
    max_num_batched_tokens=512,
    step_time_target_ms=100.0,
    threads=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("greedy"), SPEC, seed=11)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, SPEC.vocab_size, n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("overlap", [True, False])
async def test_greedy_answers_equal_mlx_lms_together_and_alone(
    folder: Path, prompts: list[list[int]], overlap: bool
) -> None:
    config = replace(ENGINE, kv_backend="posix", prefix_keep_s=1000.0, overlap=overlap)
    machine = MachineMemory(8 << 30, 4 << 30)
    plan = plan_engine(config, read_checkpoint(folder), machine, ON_CPU["posix"])
    client = started(lambda emit: build_engine(plan, config, lambda *_: None, emit))
    client.attach()
    try:
        together = await asyncio.gather(*(answer(client, ids) for ids in prompts))
        assert [len(tokens) for tokens in together] == [NEW_TOKENS] * len(prompts)
        check_by_reference(read_checkpoint(folder), prompts, together)
        assert [await answer(client, ids) for ids in prompts] == together
        # The second time, what is shared was computed in company.
        assert client.stats.cached_prompt_tokens > 1800
    finally:
        assert client.stop(10.0)


async def answer(client: EngineClient, ids: list[int]) -> list[int]:
    stream = submit(client, tuple(ids), SamplingParams(NEW_TOKENS, temperature=0.0))
    tokens: list[int] = []
    while batch := await stream.next_batch(60.0):
        for event in batch:
            assert event.message is None
            if event.token_id is not None:
                tokens.append(event.token_id)
    return tokens


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_answers_go_on_exactly_after_preemption(folder: Path, penalty: float) -> None:
    """Seeds, penalties and what was said: the same with memory for all and with memory for few. The
    draw is among four tokens: rounding, which depends on who shares the step, moves few bounds."""

    def run(blocks: int) -> tuple[Answers, int]:
        block_bytes = 16 * 2 * SPEC.num_hidden_layers * SPEC.num_key_value_heads * SPEC.head_dim * 4
        config = replace(
            ENGINE,
            kv_budget_bytes=blocks * block_bytes,
            heap_bytes=block_bytes,
            max_model_len=250,
            step_time_target_ms=1e6,
            overlap=True,
        )
        machine = MachineMemory(8 << 30, 4 << 30)
        plan = plan_engine(config, read_checkpoint(folder), machine, ON_CPU["posix"])
        answers = Answers.empty()
        loop = build_engine(plan, config, lambda *_: None, answers)
        for number in range(1, 7):
            params = SamplingParams(
                120, temperature=0.8, top_k=4, seed=number, frequency_penalty=penalty, logprobs=2
            )
            prompt = tuple(range(number, number + 20 * number))
            loop.mailbox.put(request_of(number, prompt, params))
        run_dry(loop)
        return answers, loop._scheduler.counters.preemptions

    roomy, none = run(120)
    tight, some = run(32)
    assert (none, some > 0) == (0, True)
    assert tight.tokens == roomy.tokens
    assert tight.finished == roomy.finished
