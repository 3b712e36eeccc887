"""Greedy answers of mixtures of experts and hybrids equal mlx-lm's; ``make parity`` tries more."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.models.parity import FORMS, LEAST_DISTINCT, ROUNDING, Form, Parity, compare, judge

# What is left out is the first form with MLX's names.
QUICK = [form for form in FORMS if form.hub or form.packing]
QUICK += [
    replace(form, stored="two rope_theta", fields=form.fields | {"rope_theta": 10_000.0})
    for form in QUICK
    if form.family.startswith("qwen3_5") and form.packing
]


@pytest.mark.parametrize("form", QUICK, ids=[form.title for form in QUICK])
def test_greedy_answers_equal_mlx_lms_alone_and_in_a_batch(tmp_path: Path, form: Form) -> None:
    its = compare(form.write(tmp_path, 3), 3, (1, 65, 100))
    assert (its.faults, its.routing.ties) == (0, 0)
    assert its.tokens == 2 * 3 * 64
    assert its.distinct >= LEAST_DISTINCT, "an answer that repeats itself would prove little"


@pytest.mark.parametrize(("gap", "faults"), [(ROUNDING / 2, 0), (2 * ROUNDING, 1)])
def test_another_token_is_a_fault_unless_it_is_as_good_within_rounding(
    gap: float, faults: int
) -> None:
    logits = np.array([[1.0, 3.0, 2.0], [0.0, 1.0, 5.0]])
    logits[0, 2] = 3.0 - gap * logits.std()
    found = Parity()
    judge(found, logits, [2, 2])
    assert found.gaps == pytest.approx([gap], rel=0.1)
    assert found.faults == faults
