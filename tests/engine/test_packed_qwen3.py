"""The forward over packed layers against mlx-lm's own, and against itself in other company."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from engine.checkpoint import read_checkpoint
from engine.models.packed_qwen3 import PackedQwen3
from engine.weights import Arithmetic, load_qwen3, load_reference
from tests.engine.test_qwen3 import SPEC, cache_for, prompt, spread, step
from tests.kvcache.managers import join
from tests.models import write_model

# Of the logits' standard deviation: float32 against float32 in another order, x in two bfloat16
# parts where a matrix unit multiplies.
TOLERANCE = 1e-4


def packed(folder: Path, instruction_set: str) -> PackedQwen3:
    workers = metal_ext.CpuWorkers(2, instruction_set)
    model = load_qwen3(read_checkpoint(folder), Arithmetic.PACKED, lambda *_: None, workers)
    assert isinstance(model, PackedQwen3)
    return model


@pytest.mark.parametrize("instruction_set", metal_ext.instruction_sets())
@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "bits": 4},
        {"dtype": "bfloat16", "bits": 8, "group_size": 64},
        {"dtype": "float16", "bits": 4, "group_size": 128},
    ],
)
def test_logits_equal_mlx_lms_in_float32(
    tmp_path: Path, how: dict[str, Any], instruction_set: str
) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, **how))
    # Not unpacked: that rounds to the checkpoint's own 16 bits.
    reference = load_reference(checkpoint, Arithmetic.QUANTIZED_FLOAT32, lambda *_: None)
    kv, ids = cache_for(checkpoint, 4), prompt(90)
    assert join(kv, 1, 90)
    ours = packed(tmp_path, instruction_set)
    got = [step(ours, kv, [(1, 0, ids[:70])], list(range(70)))]
    got += [step(ours, kv, [(1, 70 + i, [ids[70 + i]])], [0]) for i in range(20)]
    assert spread(mx.concatenate(got), reference(mx.array([ids]))[0]) < TOLERANCE


def test_an_untied_head_is_used(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, replace(SPEC, tie_word_embeddings=False)))
    reference = load_reference(checkpoint, Arithmetic.FLOAT32, lambda *_: None)
    kv, ids = cache_for(checkpoint, 4), prompt(20)
    assert join(kv, 1, 20)
    got = step(packed(tmp_path, "auto"), kv, [(1, 0, ids)], [19])
    assert spread(got, reference(mx.array([ids]))[0, -1:]) < TOLERANCE


def test_positions_that_are_scaled_stay_so(tmp_path: Path) -> None:
    file = write_model(tmp_path, SPEC) / "config.json"
    scaling = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    file.write_text(json.dumps(json.loads(file.read_text()) | scaling))
    checkpoint = read_checkpoint(tmp_path)
    reference = load_reference(checkpoint, Arithmetic.FLOAT32, lambda *_: None)
    kv, ids = cache_for(checkpoint, 4), prompt(60)
    assert join(kv, 1, 60)
    got = step(packed(tmp_path, "auto"), kv, [(1, 0, ids)], list(range(60)))
    assert spread(got, reference(mx.array([ids]))[0]) < TOLERANCE


def test_with_no_rows_only_the_cache_is_filled(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, dtype="bfloat16"))
    ours, ids = packed(tmp_path, "auto"), prompt(50)

    def last_logits(first_rows: mx.array | None) -> np.ndarray[Any, Any]:
        kv = cache_for(checkpoint, 4)
        assert join(kv, 1, 50)
        assert kv.reserve(1, 49)
        views = kv.views([(1, 0, 49)])
        states = ours.hidden(mx.array(ids[:49]), mx.arange(49), views, first_rows)
        assert (states is None) == (first_rows is None)
        mx.eval(views.step_end([] if states is None else [states]))
        kv.commit(1, ids[:49])
        return np.array(step(ours, kv, [(1, 49, ids[49:])], [0]))

    assert np.array_equal(last_logits(None), last_logits(mx.array([48])))


@pytest.mark.parametrize("instruction_set", metal_ext.instruction_sets())
def test_an_id_outside_of_the_vocabulary_spoils_its_own_sequence_alone(
    tmp_path: Path, instruction_set: str
) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, dtype="bfloat16"))
    ours, ids = packed(tmp_path, instruction_set), prompt(40)

    def last_logits(*others: list[int]) -> mx.array:
        kv = cache_for(checkpoint, 2)
        plan = [(number, 0, its) for number, its in enumerate((ids, *others), 1)]
        for number, _, _ in plan:
            assert join(kv, number, 60)
        return step(ours, kv, plan, [40 * i + 39 for i in range(len(plan))])

    spoilt = [*ids[:20], checkpoint.vocab_size, *ids[21:]]
    good, bad = last_logits(spoilt)
    assert mx.isnan(bad).all().item()
    assert mx.array_equal(good, last_logits()[0]).item()


def test_a_row_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, dtype="bfloat16"))
    ours = packed(tmp_path, "auto")
    ids = {number: prompt(40, seed=number) for number in range(1, 6)}

    def last_logits(numbers: list[int]) -> np.ndarray[Any, Any]:
        kv = cache_for(checkpoint, 2)
        for number in numbers:
            assert join(kv, number, 60)
        rows = [40 * i + 39 for i in range(len(numbers))]
        return np.array(step(ours, kv, [(n, 0, ids[n]) for n in numbers], rows))

    together = last_logits(list(ids))
    for row, number in enumerate(ids):
        assert np.array_equal(together[row], last_logits([number])[0])
