"""Answers go on after preemption as if nothing had happened."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.types import SamplingParams
from tests.engines import CONFIG, Answers, built_loop, request_of, run_dry
from tests.models import SMALL, write_model

SPEC = replace(SMALL, num_attention_heads=6, vocab_size=1024)
ENGINE = replace(
    CONFIG,
    page_bytes=None,
    max_model_len=250,
    max_num_batched_tokens=512,
    step_time_target_ms=1e6,
    threads=2,
    overlap=True,
)


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_answers_go_on_exactly_after_preemption(tmp_path: Path, penalty: float) -> None:
    """Answers with memory for few sequences equal those with memory for all. Sampling draws among
    four tokens, so that rounding, which depends on the step's rows, rarely changes a draw."""
    folder = write_model(tmp_path, SPEC, seed=11)

    def run(blocks: int) -> tuple[Answers, int]:
        block_bytes = 16 * 2 * SPEC.num_hidden_layers * SPEC.num_key_value_heads * SPEC.head_dim * 4
        config = replace(ENGINE, kv_budget_bytes=blocks * block_bytes, heap_bytes=block_bytes)
        answers = Answers.empty()
        loop = built_loop(folder, config, answers)
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
