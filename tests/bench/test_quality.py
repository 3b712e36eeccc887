import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metal_ext
from engine.models.checkpoint import read_checkpoint
from kvcache.layout import KVFormat
from tests.bench import llama, quality
from tests.bench.models import KINDS
from tests.bench.peers import BrokenError
from tests.bench.quality import (
    DEMO,
    MLX_PROMPTS,
    PROMPTS,
    ExactModel,
    Numbers,
    Quality,
    Subject,
    agreement,
    conversations,
    demo_prompts,
    kl,
    llama_rows,
    mlx_logits,
    mlx_rows,
    quantise,
    quire_rows,
    random_prompts,
    read_logs,
    side_text,
)
from tests.models import ModelSpec, write_model
from tests.published import Published

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
POSITIONS = 45


def logs(*probabilities: float) -> Numbers:
    its: Numbers = np.log(np.array([probabilities]))
    return its


def subject(folder: Path, **how: Any) -> Subject:
    path = write_model(folder, SPEC, gain=3.0, **how)
    return Subject("tiny", "any", path, ExactModel(path), PROMPT_IDS, None)


# --- pure ----------------------------------------------------------------------------------------


def test_a_divergence_is_the_sum_of_its_definition() -> None:
    want = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl(logs(0.5, 0.5), logs(0.25, 0.75)) == pytest.approx([want])


def test_logits_that_differ_by_a_constant_do_not_diverge() -> None:
    its = np.random.default_rng(0).normal(size=(5, 100))
    assert np.abs(kl(its, its + 300.0)).max() < 1e-12


def test_the_logits_of_small_errors_diverge_by_half_their_variance() -> None:
    rng = np.random.default_rng(0)
    even, noise = np.zeros((1, 100_000)), rng.normal(scale=1e-3, size=(1, 100_000))
    assert kl(even, even + noise) == pytest.approx([0.5e-6], rel=0.02)


def test_agreement_is_the_share_of_positions_with_the_same_best_token() -> None:
    exact = np.eye(4)
    other = exact.copy()
    other[1] = [0.0, 0.4, 0.5, 0.1]
    assert agreement(exact, exact) == 1.0
    assert agreement(exact, other) == 0.75


def test_a_row_says_how_many_positions_it_stands_for() -> None:
    exact = np.log(np.full((200, 2), 0.5))
    other = exact.copy()
    other[:4] = np.log([0.25, 0.75])
    its = Quality.of(exact, other)
    assert its.positions == 200
    assert its.mean == pytest.approx(0.02 * kl(exact, other)[0])
    assert its.high == pytest.approx(kl(exact, other)[0])
    assert its.cells() == ("200", "2.9e-03", "1.4e-01", "98.00 %")


def test_equal_rows_name_their_activations_and_sets_once() -> None:
    assert side_text([("float32", "avx2")]) == "float32 on avx2"
    both = [
        ("float32", "avx512"),
        ("float32", "avx2"),
        ("bfloat16", "avx512"),
        ("bfloat16", "avx2"),
    ]
    assert side_text(both) == "float32, bfloat16 on avx512, avx2"
    assert side_text([*both, ("int8", "avx2")]) == (
        "float32, bfloat16 on avx512; float32, bfloat16, int8 on avx2"
    )


def test_what_llama_server_tells_is_put_in_the_order_of_ids() -> None:
    told = [{"id": 2, "logprob": -0.5}, {"id": 0, "logprob": -1.5}, {"id": 1, "logprob": -2.0}]
    answer = {"completion_probabilities": [{"top_logprobs": told}]}
    assert read_logs(answer, 3).tolist() == [-1.5, -2.0, -0.5]
    with pytest.raises(BrokenError, match="3 of 4 tokens"):
        read_logs(answer, 4)


def test_a_conversation_is_written_as_the_template_does_without_thoughts(tmp_path: Path) -> None:
    file = tmp_path / "dialogues.txt"
    file.write_text("# what this is\n\nuser: a: b\nthink: hm\nquire: c\n")
    assert conversations(file) == (
        "<|im_start|>user\na: b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    )


def test_the_demos_prompts_are_whole_and_differ() -> None:
    count, length = PROMPTS["demo"]
    prompts = demo_prompts(DEMO / "model" / "tokenizer.json", count, length)
    assert [len(ids) for ids in prompts] == [length] * count
    assert len({tuple(ids) for ids in prompts}) == count


def test_random_prompts_have_known_tokens_alone() -> None:
    prompts = random_prompts(np.array([3, 8]), 4, 16)
    assert {len(ids) for ids in prompts} == {16}
    assert {token for ids in prompts for token in ids} == {3, 8}


# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "bits": 4, "group_size": 64},
        {"dtype": "float32", "rope_theta": ..., "rope_parameters": {"rope_theta": 5000.0}},
    ],
)
def test_the_exact_logits_are_mlx_lms_within_float32(tmp_path: Path, how: dict[str, Any]) -> None:
    its = subject(tmp_path, **how)
    exact = its.model.logits(its.prompts)
    checkpoint = read_checkpoint(its.folder)
    logits = mlx_logits(checkpoint, its.prompts, its.model.tokens, stored=False)
    assert exact.shape == logits.shape == (POSITIONS, SPEC.vocab_size)
    assert kl(exact, logits).max() < 1e-9
    assert agreement(exact, logits) == 1.0


def test_quires_rows_name_every_setting_once_and_lose_little(tmp_path: Path) -> None:
    its = subject(tmp_path, dtype="bfloat16", bits=4, group_size=64)
    sets = metal_ext.instruction_sets()
    exact = its.model.logits(its.prompts)
    *rows, (wide, best) = quire_rows(its, exact, sets, 2, KVFormat.BFLOAT16)
    assert all(quality.positions == POSITIONS for _, quality in rows)
    assert all(quality.mean < 0.1 for _, quality in rows)
    assert sum(side.count("float32") for side, _ in rows) >= 1
    assert wide == f"quire, float32 on {sets[0]}, K and V in float32"
    assert best.mean < 1e-6
    assert best.same == 1.0


def test_eight_bits_lose_more_than_sixteen_where_a_set_has_both(tmp_path: Path) -> None:
    if "vnni" not in metal_ext.instruction_sets():
        pytest.skip("this processor has no VNNI")
    its = subject(tmp_path, dtype="bfloat16", bits=4, group_size=64)
    exact = its.model.logits(its.prompts)
    rows = dict(quire_rows(its, exact, ["vnni"], 2, KVFormat.FLOAT32))
    eight, sixteen = (
        rows[f"quire, {name} on vnni, K and V in float32"] for name in ("int8", "bfloat16")
    )
    assert eight.mean > 10 * sixteen.mean


def test_only_tokens_with_an_embedding_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, quality.RANDOM, Published(SPEC))
    for form in quality.FORMS:
        its = quality.random_subject(form, tmp_path)
        assert its.model.vocab_size == SPEC.vocab_size
        assert its.model.tokens.tolist() == list(range(94))
        assert its.model.logits([[0, 1]]).shape == (2, 94)


def test_the_demo_in_four_bits_is_a_model_near_the_demo(tmp_path: Path) -> None:
    folder = quantise(DEMO / "model", tmp_path / "packed")
    prompts = demo_prompts(DEMO / "model" / "tokenizer.json", 1, 64)
    exact, packed = (ExactModel(its).logits(prompts) for its in (DEMO / "model", folder))
    assert 1e-6 < kl(exact, packed).mean() < 0.5
    assert read_checkpoint(folder).vocab_size == exact.shape[1]


def test_mlx_lm_may_read_the_first_prompts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = subject(tmp_path)
    exact = its.model.logits(its.prompts)
    assert [quality.positions for _, quality in mlx_rows(its, exact)] == [POSITIONS] * 2
    monkeypatch.setitem(MLX_PROMPTS, its.name, 1)
    rows = [quality for _, quality in mlx_rows(its, exact)]
    assert [its.positions for its in rows] == [len(PROMPT_IDS[0])] * 2
    assert all(its.mean < 1e-9 for its in rows)


def test_llama_server_takes_no_part_in_four_bits(tmp_path: Path) -> None:
    its = subject(tmp_path)
    assert list(llama_rows(its, np.zeros((1, 1)), ["avx2"], 2, llama.Builds(tmp_path))) == []


def test_a_set_that_the_processor_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert quality.main(["--sets", "abacus"]) == 2
    assert "no abacus" in capsys.readouterr().err


def test_the_table_has_every_side_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality, "demo_subject", lambda form, made: subject(tmp_path))
    best = metal_ext.instruction_sets()[0]
    assert quality.main(["--model", "demo", "--weights", "bfloat16", "--sets", best]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert {line.count("|") for line in (head, *lines)} == {len(quality.HEADINGS) + 1}
    sides = [line.split(" | ")[2] for line in lines]
    assert sides[-2:] == ["mlx-lm in bfloat16", "mlx-lm in float32"]
    assert all(side.startswith("quire, ") for side in sides[:-2])
