"""A Llama's ``config.json`` becomes a spec, and its answers are mlx-lm's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.models.checkpoint import read_checkpoint
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Attention, DenseMlp, LayerSpec, Rope
from tests.engine.models.families.greedy import TIED_OR_PACKED, check_greedy_answers
from tests.models import TINY, write_config, write_model

# As in Llama 3.2, for a shorter context.
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(("tied", "how"), TIED_OR_PACKED, ids=str)
def test_greedy_answers_equal_mlx_lms_alone_and_together(
    tmp_path: Path, tied: bool, how: dict[str, Any]
) -> None:
    scaled: dict[str, Any] = {"rope_scaling": SCALING, "rope_theta": 500_000.0}
    check_greedy_answers(tmp_path, tied=tied, model_type="llama", **scaled, **how)


def test_greedy_answers_with_longrope_equal_mlx_lms(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + pair / 4 for pair in range(16)],
    }
    check_greedy_answers(tmp_path, tied=True, model_type="llama", rope_scaling=scaling)


def leave_frequencies(folder: Path) -> None:
    """Adds what older files have of RoPE."""
    left = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": mx.ones((16,)) for n in range(4)}
    mx.save_safetensors(str(folder / "model-old.safetensors"), left)


@pytest.mark.parametrize(
    ("tied", "missing"),
    [
        (True, {"rope_theta": ...}),
        (False, {"num_key_value_heads": ...}),
        (True, {"tie_word_embeddings": ...}),
        (False, {"rope_theta": ..., "num_key_value_heads": ...}),
        (True, {"rope_theta": ..., "tie_word_embeddings": ...}),
        (True, {"tie_word_embeddings": ..., "num_key_value_heads": ..., "bits": 4}),
    ],
    ids=str,
)
def test_an_older_llama_is_read_as_mlx_lm_reads_it(
    tmp_path: Path, tied: bool, missing: dict[str, Any]
) -> None:
    older: dict[str, Any] = {"renamed": leave_frequencies, "lengths": (1, 65, 300)}
    check_greedy_answers(tmp_path, tied=tied, model_type="llama", **older, **missing)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_the_files_is_the_head_where_the_config_does_not_say(
    tmp_path: Path, tied: bool
) -> None:
    write_model(tmp_path, replace(TINY, tie_word_embeddings=tied), model_type="llama")
    write_config(tmp_path, TINY, model_type="llama", tie_word_embeddings=...)
    assert read_checkpoint(tmp_path).spec.tied_embeddings == tied


@pytest.mark.parametrize("head_dim", [..., None, 64])
def test_a_llama_has_neither_norms_nor_biases(tmp_path: Path, head_dim: object) -> None:
    folder = write_config(tmp_path, TINY, model_type="llama", head_dim=head_dim)
    spec = read_spec(ModelConfig(folder))
    wide = head_dim if isinstance(head_dim, int) else 32
    attention = Attention(2, 1, wide, Rope(1_000_000.0), qk_norm=False, qkv_bias=False)
    assert (spec.family, spec.layers) == ("Llama", (LayerSpec(attention, DenseMlp(128)),) * 2)


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_a_llama_with_biases_is_refused_by_name(tmp_path: Path, field: str) -> None:
    folder = write_config(tmp_path, TINY, model_type="llama", **{field: True})
    with pytest.raises(CheckpointError, match=f"{field} is true"):
        read_spec(ModelConfig(folder))
