"""A Qwen3 MoE's ``config.json`` becomes a spec, and its greedy answers equal mlx-lm's."""

from pathlib import Path
from typing import Any

import pytest

from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import DenseMlp, Experts
from tests.engine.models.families.greedy import check_greedy_answers
from tests.experts import QWEN3_MOE, ROUTERS, names_apart
from tests.models import ModelSpec, write_config

SIX_LAYERS = ModelSpec(num_hidden_layers=6)
EXPERTS = Experts(8, 3, inner_size=64, normalised=True)


def test_layers_have_experts_or_a_dense_mlp_as_the_config_says(tmp_path: Path) -> None:
    fields = QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = read_spec(ModelConfig(write_config(tmp_path, SIX_LAYERS, **fields)))
    assert spec.family == "Qwen3 MoE"
    dense = DenseMlp(128)
    assert [its.mlp for its in spec.layers] == [dense, EXPERTS, dense, dense, dense, EXPERTS]
    assert all(its.qk_norm for its in spec.attentions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, r"config.json: num_experts is 0; it must be a number above 0"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than num_experts \(8\)"),
        ({"moe_intermediate_size": None}, r"moe_intermediate_size is None"),
        ({"norm_topk_prob": 1}, r"norm_topk_prob is 1; it must be true or false"),
        ({"decoder_sparse_step": ...}, r"decoder_sparse_step is None"),
        ({"mlp_only_layers": 3}, r"mlp_only_layers is 3; it must be a list"),
    ],
)
def test_fault_16_a_broken_config_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_config(tmp_path, SIX_LAYERS, **(QWEN3_MOE | changes))
    with pytest.raises(CheckpointError, match=message):
        read_spec(ModelConfig(folder))


@pytest.mark.parametrize("seed", [1, 3, 4])
@pytest.mark.parametrize(
    "how",
    [
        {"renamed": names_apart},
        {"bits": 4, "group_size": 64, "layers": ROUTERS},
    ],
    ids=["bfloat16, the hub's names", "4 bits, routers in 8"],
)
def test_greedy_answers_equal_mlx_lms_alone_and_in_a_batch_of_eight(
    tmp_path: Path, how: dict[str, Any], seed: int
) -> None:
    check_greedy_answers(
        tmp_path,
        tied=seed == 1,
        lengths=(1, 17, 63, 64, 65, 100, 150, 200),
        seed=seed,
        new_tokens=64,
        least_distinct=32,
        **{"dtype": "bfloat16"} | how,
        **(QWEN3_MOE | {"mlp_only_layers": [2]}),
    )
