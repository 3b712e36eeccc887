"""The measure of rounding: the divergence, and the exact logits that it is from."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.models.checkpoint import read_checkpoint
from tests.bench.quality import ExactModel, Quality, Subject, agreement, kl, mlx_logits
from tests.models import ModelSpec, write_model

SPEC = ModelSpec(
    num_hidden_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=384,
)
PROMPT_IDS = [list(range(7, 47)), [301, 5, 5, 80], [9]]


def subject(folder: Path, **how: Any) -> Subject:
    path = write_model(folder, SPEC, gain=3.0, **how)
    return Subject("tiny", "any", path, ExactModel(path), PROMPT_IDS)


def test_a_divergence_is_the_sum_of_its_definition_over_all_positions() -> None:
    exact = np.log(np.full((200, 2), 0.5))
    other = exact + 300.0
    other[:4] = np.log([0.25, 0.75])
    want = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl(exact, other) == pytest.approx([want] * 4 + [0.0] * 196, abs=1e-12)
    its = Quality.of(exact, other)
    assert (its.positions, its.same) == (200, 0.98)
    assert (its.mean, its.high) == pytest.approx((0.02 * want, want))


@pytest.mark.parametrize("how", [{}, {"bits": 4, "group_size": 64}])
def test_the_exact_logits_are_mlx_lms_within_float32(tmp_path: Path, how: dict[str, Any]) -> None:
    its = subject(tmp_path, dtype="bfloat16", **how)
    exact = its.model.logits(its.prompts)
    checkpoint = read_checkpoint(its.folder)
    logits = mlx_logits(checkpoint, its.prompts, its.model.tokens, stored=False)
    assert kl(exact, logits).max() < 1e-9
    assert agreement(exact, logits) == 1.0
