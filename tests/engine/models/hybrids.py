"""Random models of many families, as MLX's tools and as the hub have them; steps of ours."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from engine.models.checkpoint import Checkpoint
from engine.models.forward import Forward
from kvcache.layout import KVFormat
from kvcache.manager import KVCacheManager
from tests.engine.models.forwards import cache_for, prompt
from tests.families import (
    BONSAI,
    bonsai_modules,
    names_apart,
    names_fused,
    names_in_blocks,
    nests_text,
)
from tests.families import FIELDS as FIELDS
from tests.families import QWEN3_5_MOE as QWEN3_5_MOE
from tests.families import QWEN3_NEXT as QWEN3_NEXT
from tests.kvcache.managers import join
from tests.models import SMALL, ModelSpec, write_model

SPEC = replace(SMALL, num_hidden_layers=6, head_dim=64)
# Blocks of a rotation have 512 inputs at least.
BONSAI_SPEC = replace(
    SMALL,
    num_hidden_layers=3,
    hidden_size=512,
    head_dim=128,
    intermediate_size=1024,
    vocab_size=1024,
    tie_word_embeddings=False,
)
EIGHT_BITS = {"bits": 8, "group_size": 64}
MIXED: dict[str, Any] = {
    "bits": 4,
    "group_size": 64,
    "layers": {"mlp.gate": EIGHT_BITS, "shared_expert_gate": EIGHT_BITS},
}
"""As mlx-lm packs mixtures of experts."""
POST_NORMS = {"post_attention_layernorm": 3, "post_feedforward_layernorm": 12}
"""What is added to Gemmas' norms: else the token itself, or what all have in common, would decide,
and an answer would say one token again and again."""
ON_THE_HUB = {
    "qwen3_5_moe": names_fused,
    "qwen3_next": names_apart,
    "gemma3_text": nests_text,
    "gpt_oss": names_in_blocks,
}
TEXT_NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")


def write_hybrid(folder: Path, spec: ModelSpec = SPEC, *, hub: bool = False, **how: Any) -> Path:
    """A model whose weights are all random, a dense Qwen3.5 unless fields are another's. hub: named
    and kept as the hub has them, with parts that text does not need. how: as for write_model."""
    fields = how if "model_type" in how else FIELDS | how
    write_model(folder, spec, **fields)
    file = folder / "model.safetensors"
    weights = cast(dict[str, mx.array], mx.load(str(file)))
    if str(fields["model_type"]).startswith("gemma"):  # no files have the head of mlx-lm's class
        weights = {
            name: each + POST_NORMS.get(name.split(".")[-2], 0)
            for name, each in weights.items()
            if "lm_head" not in name
        }
    for number, (name, array) in enumerate(sorted(weights.items())):
        if (array.ndim == 1 or name.endswith(".bias")) and not name.endswith(
            (".A_log", ".scales", ".biases")
        ):
            noise = mx.random.normal(array.shape, key=mx.random.key(number)) * 0.3
            weights[name] = (array + noise).astype(array.dtype)
    nested = str(fields["model_type"]).startswith("qwen3_5")
    if hub and str(fields["model_type"]).startswith("qwen"):
        weights = dict(_as_on_the_hub(name, array) for name, array in weights.items())
        weights |= {} if "head" in how else {"mtp.norm.weight": mx.ones((4,))}
    if hub and nested:
        weights["model.visual.merger.norm.weight"] = mx.ones((4,))
        config = json.loads((folder / "config.json").read_text())
        outer = ("model_type", "architectures", "quantization", "tie_word_embeddings")
        inner = {key: value for key, value in config.items() if key not in outer[:3]}
        kept = {key: value for key, value in config.items() if key in outer}
        (folder / "config.json").write_text(json.dumps(kept | {"text_config": inner}))
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    return ON_THE_HUB.get(fields["model_type"], Path)(folder) if hub else folder


def write_bonsai(
    folder: Path, spec: ModelSpec = BONSAI_SPEC, *, apart: bool = False, **how: Any
) -> Path:
    """A dense Qwen3.5 as Bonsai 2 is packed. apart: as schema 1 has it; layers have signs of their
    own, and every third is not rotated. Else the signs follow from the count of inputs. how: as for
    write_model."""
    wide: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    write_hybrid(folder, spec, **({"dtype": "float32"} | wide | how))
    config = json.loads((folder / "config.json").read_text())
    weights = cast(dict[str, mx.array], mx.load(str(folder / "model.safetensors")))
    plain = [name for name in weights if name.endswith(("proj_a.weight", "proj_b.weight"))]
    weights |= {name: weights[name].astype(mx.float16) for name in plain}
    modules = bonsai_modules(spec.num_hidden_layers, config["full_attention_interval"], 512)
    modules = modules[spec.tie_word_embeddings :]
    for number, module in enumerate(modules):
        name = f"language_model.{module['path']}"
        matrix = weights.pop(f"{name}.weight")
        if apart and number % 3 == 0:
            module["block"] = 0
        else:
            key = mx.random.key(number if apart else matrix.shape[1])
            random = mx.random.bernoulli(0.5, matrix.shape[1:], key=key)
            weights[f"{name}.signs"] = mx.where(random, 1.0, -1.0)
        weights[f"{name}.weight"], *groups = mx.quantize(matrix, group_size=128, bits=2)
        for part, array in zip(("scales", "biases"), groups, strict=True):
            weights[f"{name}.{part}"] = array.astype(mx.float16)
    outer = BONSAI | {"modules": modules, "tie_word_embeddings": spec.tie_word_embeddings}
    if apart:
        weights = {name.removeprefix("language_model."): each for name, each in weights.items()}
        outer |= {"schema_version": 1, "tensor_namespace": "mlx-lm-text"}
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    text = config | {"model_type": "qwen3_5_text", "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    return folder


def _as_on_the_hub(name: str, array: mx.array) -> tuple[str, mx.array]:
    named = name.replace("language_model.model.", "model.language_model.")
    named = named.replace("language_model.lm_head", "lm_head")
    if name.endswith("conv1d.weight"):
        return named, mx.contiguous(array.moveaxis(1, 2))
    if name.removesuffix(".weight").endswith(TEXT_NORMS):
        return named, array - 1
    return named, array


class Steps:
    """A model over a cache of its own."""

    def __init__(self, checkpoint: Checkpoint, model: Forward, lengths: dict[int, int]) -> None:
        """lengths: of each sequence, at most."""
        self.model = model
        self.kv: KVCacheManager = cache_for(checkpoint, KVFormat.FLOAT32)
        for seq, length in lengths.items():
            assert join(self.kv, seq, length)

    def run(
        self, plan: list[tuple[int, int, list[int]]], rows: list[int] | None
    ) -> mx.array | None:
        """Runs (sequence, start, tokens) segments; returns the logits of the rows."""
        for seq, start, tokens in plan:
            assert self.kv.reserve(seq, start + len(tokens))
        views = self.kv.views([(seq, start, len(tokens)) for seq, start, tokens in plan])
        flat = [token for _, _, tokens in plan for token in tokens]
        wanted = None if rows is None else mx.array(rows)
        states = self.model.hidden(mx.array(flat), views, wanted)
        logits = None if states is None else self.model.head(states)
        mx.eval(views.step_end([] if logits is None else [logits]))
        for seq, _, tokens in plan:
            self.kv.commit(seq, tokens)
        self.kv.step_completed(views.epoch)
        return logits


def logits_in_chunks_and_company(
    checkpoint: Checkpoint, model: Forward, ids: list[int], other: list[int]
) -> tuple[mx.array, mx.array]:
    """Return the logits of both prompts, of 200 and 30 tokens: the first one in three chunks, of
    which the second stands beside the other prompt."""
    steps = Steps(checkpoint, model, {1: 200, 2: 30})
    got = [steps.run([(1, 0, ids[:150])], list(range(150)))]
    got.append(steps.run([(2, 0, other), (1, 150, ids[150:199])], list(range(79))))
    got.append(steps.run([(1, 199, ids[199:])], [0]))
    first, both, last = (logits.astype(mx.float32) for logits in got if logits is not None)
    return mx.concatenate([first, both[30:], last]), both[:30]


def assert_chunks_change_no_bit(checkpoint: Checkpoint, model: Forward) -> None:
    """Compare the last logits of a prompt of 130 tokens, whole and in chunks."""
    ids = prompt(130)

    def last(cuts: list[int]) -> np.ndarray[Any, Any]:
        steps = Steps(checkpoint, model, {1: 130})
        for first, end in zip([0, *cuts], [*cuts, 130], strict=True):
            logits = steps.run([(1, first, ids[first:end])], [end - first - 1])
        return np.array(logits)

    whole = last([])
    for cuts in ([1], [64, 65, 100], list(range(1, 130))):
        assert np.array_equal(last(cuts), whole)
