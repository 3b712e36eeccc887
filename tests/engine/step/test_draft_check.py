"""Drafts change no bits of a model on a CPU. A model whose bits they change is refused."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from engine.step.draft_check import COMPANY, DraftCheck
from engine.step.loop import EngineLoop
from engine.step.runner import Model
from kvcache.replay import DraftInputs, Inputs
from kvcache.views import KVViews
from tests.engine.models.hybrids import FIELDS, QWEN3_5_MOE, write_hybrid
from tests.engines import BLOCK_BYTES, CONFIG, built_loop, recall_loop
from tests.families import GPT_OSS, QWEN3_MOE

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_5": FIELDS,
    "qwen3_5_moe": QWEN3_5_MOE,
    "with a head": FIELDS | {"head": "mtp"},
    "gpt_oss": GPT_OSS,
    "packed": {"model_type": "qwen3", "bits": 4},
}


def fault_of(
    loop: EngineLoop, model: Model | None = None, max_num_seqs: int = 8, max_rows: int = 24
) -> str:
    own, vocab = loop._runner._model, loop.limits.vocab_size  # type: ignore[attr-defined]
    workers = loop._runner._workers  # type: ignore[attr-defined]
    check = DraftCheck(own if model is None else model, loop._kv, vocab, workers)
    fault = check.fault(max_num_seqs, max_rows)
    stats = loop._kv.stats()
    assert (stats.num_sequences, stats.live_bytes, stats.cached_bytes) == (0, 0, 0)
    loop._kv.check_invariants()
    return fault


@pytest.mark.parametrize("instruction_set", metal_ext.instruction_sets())
@pytest.mark.parametrize("model", MODELS)
def test_on_a_cpu_drafts_change_no_bit(tmp_path: Path, model: str, instruction_set: str) -> None:
    folder = write_hybrid(tmp_path, gain=2.0, **MODELS[model])
    config = replace(CONFIG, page_bytes=None, kv_budget_bytes=None, activations="auto")
    config = replace(config, instruction_set=instruction_set)
    loop = built_loop(folder, config, lambda _: None)
    assert fault_of(loop) == ""
    loop.close()


@dataclass
class ByRows:
    """A model that computes other bits for the last row of a step with ``rows`` rows or more."""

    model: Model
    rows: int

    def hidden(self, token_ids: mx.array, views: KVViews, rows: mx.array | None) -> mx.array | None:
        states = self.model.hidden(token_ids, views, rows)
        if states is None or len(states) < self.rows:
            return states
        return mx.concatenate([states[:-1], states[-1:] * (1 + 2**-22)])

    def head(self, states: mx.array) -> mx.array:
        return self.model.head(states)


@pytest.mark.parametrize(
    ("rows", "fault"), [(2, 8), (8, 8), (9, 8 * COMPANY), (24, 8 * COMPANY), (25, 0)]
)
def test_a_model_whose_bits_depend_on_the_rows_of_a_step_is_refused(rows: int, fault: int) -> None:
    loop = recall_loop(lambda _: None)
    model = ByRows(loop._runner._model, rows)  # type: ignore[attr-defined]
    words = f"{fault} rows together have other bits than one by one"
    assert fault_of(loop, model) == (words if fault else "")
    assert fault_of(loop, model, max_num_seqs=1) == (words if fault == 8 else "")
    assert fault_of(loop, model, max_rows=8) == (words if fault == 8 else "")
    loop.close()


@pytest.mark.parametrize(("rows", "fault"), [(2, 8), (6, 8), (8, 8), (9, 0), (24, 0)])
def test_bits_of_steps_that_drafts_never_make_are_no_reason(rows: int, fault: int) -> None:
    loop = recall_loop(lambda _: None)
    model = ByRows(loop._runner._model, rows)  # type: ignore[attr-defined]
    words = f"{fault} rows together have other bits than one by one"
    assert fault_of(loop, model, max_rows=8) == (words if fault else "")
    model.rows = 3  # three sequences have two rows each
    assert fault_of(loop, model, max_rows=8).startswith("8 rows")
    loop.close()


@pytest.mark.parametrize(
    "changes", [{"max_model_len": 16}, {"max_model_len": 32, "kv_budget_bytes": 4 * BLOCK_BYTES}]
)
def test_a_cache_that_is_too_small_is_no_proof(changes: dict[str, Any]) -> None:
    loop = recall_loop(lambda _: None, **changes)
    assert "too small" in fault_of(loop)
    loop.close()


@pytest.mark.parametrize("granted", [0, 1])
def test_memory_that_is_short_meanwhile_is_no_proof(
    granted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = recall_loop(lambda _: None)
    reserve, left = loop._kv.reserve, iter([True] * granted)
    monkeypatch.setattr(loop._kv, "reserve", lambda *each: next(left, False) and reserve(*each))
    assert "too small" in fault_of(loop)
    loop.close()


def test_states_that_drafts_leave_behind_are_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows after drafts depend on what was repeated of them."""

    def forget(inputs: DraftInputs, layer: int, arrays: Inputs) -> None:
        inputs.by_layer[layer] = [array[inputs._rows] * 0 for array in arrays]

    config = replace(CONFIG, page_bytes=None, kv_budget_bytes=None)
    loop = built_loop(write_hybrid(tmp_path, gain=2.0), config, lambda _: None)
    monkeypatch.setattr(DraftInputs, "add", forget)
    assert fault_of(loop) == "4 rows together have other bits than one by one"
    loop.close()
