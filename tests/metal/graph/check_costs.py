"""The planner's commands of a step are those that the graph of the engine's own forward has."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.planning.cost import CostModel
from engine.planning.devices import CPU
from kvcache.layout import KVFormat
from tests.families import FIELDS, PUBLISHED_DELTA, QWEN3_5_MOE, QWEN3_MOE
from tests.metal.graph.check_counts import commands, step

# Of mixtures, other shapes of the same numbers.
SHAPES = {"ExpandDims", "Flatten", "Unflatten", "Transpose"}
TOKENS = 300
BIASES = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    "fields",
    [{}, BIASES, QWEN3_MOE, FIELDS | PUBLISHED_DELTA, QWEN3_5_MOE | PUBLISHED_DELTA],
    ids=["dense", "biases", "mixture", "hybrid", "hybrid mixture"],
)
def test_the_planner_counts_the_commands_of_a_step(fields: dict[str, Any], tmp_path: Path) -> None:
    names = step(tmp_path, TOKENS, 4, **fields)
    spec = read_spec(ModelConfig(tmp_path))
    kv = spec.kv_shape(KVFormat.BFLOAT16, KVFormat.BFLOAT16)
    planned = CostModel.of(CPU, spec, 10**9, kv).commands(1)
    counted = commands([name for name in names if name not in SHAPES], TOKENS)
    # project_append first copies queries that lie among gates.
    counted += sum(attention.output_gate for attention in spec.attentions)
    assert sum(planned) == counted, Counter(names)
