"""Bonsai 2 is read as its pack says, or refused by a field's name, and says what mlx-lm says."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from engine.models.checkpoint import promised_checkpoint, read_checkpoint
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.forward import Forward
from engine.models.mlx_ops import MlxOps
from engine.models.safetensors_headers import CheckpointError
from engine.models.tensors import NAMINGS
from engine.models.weights import read_weights
from engine.planning.memory import own_packing, read_shape, weights_bytes
from tests.engine.models import parity
from tests.engine.models.forwards import ours, prompt, spread
from tests.engine.models.hybrids import BONSAI_SPEC, Steps, write_bonsai
from tests.families import PUBLISHED
from tests.reference import load_reference

TOLERANCE = 2e-4
PACK = PUBLISHED["Bonsai-2-27B"]
FIRST = PACK.fields["modules"][0]
DOWN = "language_model.model.layers.1.mlp.down_proj"


def test_the_published_pack_is_a_qwen3_5_with_rotated_inputs(tmp_path: Path) -> None:
    spec = read_spec(ModelConfig(PACK.write(tmp_path)))
    plain = PUBLISHED["Qwen3.6-27B"].write(tmp_path / "plain")
    assert (len(spec.blocks), {block for _, block in spec.blocks}) == (402, {1024})
    assert replace(spec, family="Qwen3.5", blocks=()) == read_spec(ModelConfig(plain))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 3}, "schema_version is 3; it must be 1 or 2"),
        ({"schema_version": 1}, "tensor_namespace is 'mlx-vlm-qwen3_5'; it must be mlx-lm-text"),
        ({"gdn_activation_layout": "tiled"}, "gdn_activation_layout is 'tiled'; it must be group"),
        ({"modules": ...}, "modules is no list"),
        ({"modules": [3]}, r"modules\[0\].path is None; it must be a new layer"),
        ({"modules": [FIRST, FIRST]}, r"modules\[1\].path is model.embed_tokens; it must be a"),
        ({"modules": [FIRST | {"block": 100}]}, r"modules\[0\].block is 100; it must be 0 or 512"),
        ({"modules": [FIRST | {"block": 512.0}]}, r"modules\[0\].block is 512.0; it must be 0"),
        ({"modules": [FIRST | {"block": 2048}]}, r"inputs of model.embed_tokens \(5120\) is not a"),
        ({"modules": [FIRST | {"dtype": "bfloat16"}]}, r"modules\[0\].dtype is 'bfloat16'; it"),
    ],
    ids=str,
)
def test_fault_16_a_pack_of_another_kind_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_spec(ModelConfig(PACK.write(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("signs", "message"),
    [
        (mx.ones((512,)), r"down_proj.signs is F32 \[512\], but config.json makes it .* \[1024\]"),
        (mx.ones((1024,), mx.uint32), "down_proj.signs is U32"),
        (mx.zeros((1024,)), "down_proj.signs has other numbers than 1 and -1"),
        (mx.full((1024,), 2.0), "down_proj.signs has other numbers than 1 and -1"),
        (mx.full((1024,), float("nan")), "down_proj.signs has other numbers than 1 and -1"),
    ],
    ids=["short", "whole numbers", "zeros", "twos", "nan"],
)
def test_signs_that_are_none_are_refused(tmp_path: Path, signs: mx.array, message: str) -> None:
    file = str(write_bonsai(tmp_path) / "model.safetensors")
    weights = cast(dict[str, mx.array], mx.load(file)) | {f"{DOWN}.signs": signs}
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    with pytest.raises(CheckpointError, match=message):
        ours(read_checkpoint(tmp_path))


def test_sizes_follow_from_the_config_alone_with_matrices_that_stay_plain(tmp_path: Path) -> None:
    whole = read_checkpoint(write_bonsai(tmp_path, linear_num_value_heads=32))
    shape, vectors = read_shape(tmp_path), 4 * whole.tensors.count(1)
    assert shape.quantization is not None
    planned = weights_bytes(shape, own_packing(shape.quantization, on_gpu=True))
    assert planned == pytest.approx(whole.stored_bytes, abs=vectors)
    (tmp_path / "model.safetensors").unlink()
    promised = promised_checkpoint(tmp_path, whole.stored_bytes)
    assert promised.packed_bytes == pytest.approx(whole.packed_bytes, abs=vectors)
    assert (promised.dtype, promised.spec) == (whole.dtype, whole.spec)
    packings = {NAMINGS[2].layer(name): packing for name, packing in promised.packings.items()}
    assert packings == whole.packings


class WideOps(MlxOps):
    """A GPU's operations in float32, which the CPU's cache takes and mlx-lm has."""

    rotated_dtype = mx.float32


@pytest.mark.parametrize("packed", [False, True], ids=["MLX", "packed"])
@pytest.mark.parametrize(
    ("how", "tied"), [({}, False), ({"schema": 1}, False), ({"apart": True}, False), ({}, True)]
)
def test_logits_equal_mlx_lms_by_chunks_and_in_company(
    tmp_path: Path, how: dict[str, Any], tied: bool, packed: bool
) -> None:
    spec = replace(BONSAI_SPEC, tie_word_embeddings=tied)
    checkpoint = read_checkpoint(write_bonsai(tmp_path, spec, **how))
    ops = WideOps(checkpoint.spec, checkpoint.tensors, read_weights(checkpoint))
    model = ours(checkpoint) if packed else Forward(checkpoint.spec, ops)
    steps, ids, other = Steps(checkpoint, model, {1: 90, 2: 30}), prompt(90), prompt(30, 1)
    first = steps.run([(1, 0, ids[:70])], list(range(70)))
    both = steps.run([(2, 0, other), (1, 70, ids[70:])], list(range(50)))
    assert first is not None
    assert both is not None
    reference = load_reference(checkpoint, stored=not packed)
    want, beside = (reference(mx.array([each]))[0].astype(mx.float32) for each in (ids, other))
    assert spread(mx.concatenate([first, both[30:]]), want) < TOLERANCE
    assert spread(both[:30], beside) < TOLERANCE


def test_greedy_answers_of_32_prompts_equal_mlx_lms_alone_and_eight_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "NEW_TOKENS", 24)
    checkpoint = read_checkpoint(write_bonsai(tmp_path, seed=3, gain=3.0))
    its = parity.compare(checkpoint, 3, range(1, 97, 3))
    assert (its.faults, its.tokens) == (0, 2 * 32 * 24)
    assert its.distinct >= 12, "an answer that repeats itself would prove little"


class Seen:
    """KVViews that keep what is appended and what recurs."""

    def __init__(self) -> None:
        self.arrays: list[mx.array] = []

    def append(self, place: int, queries: mx.array, *others: Any) -> mx.array:
        self.arrays += [queries, *others[:2]]
        return queries

    def recur(self, place: int, qkv: mx.array, z: mx.array, *others: Any) -> mx.array:
        self.arrays += [qkv, z, *others[:2]]
        return z


def test_a_gpu_computes_in_float16_and_rotates_once_what_layers_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack's norms are float32, its matrices of decays are plain."""
    checkpoint = read_checkpoint(write_bonsai(tmp_path))
    ops, reference = ours(checkpoint, packed=False).ops, load_reference(checkpoint)
    shapes: list[tuple[int, ...]] = []
    transform, views = mx.hadamard_transform, cast(Any, Seen())

    def counted(x: mx.array, scale: float | None = None) -> mx.array:
        shapes.append(x.shape)
        return transform(x, scale)

    monkeypatch.setattr(mx, "hadamard_transform", counted)
    x = ops.embed(mx.arange(7))
    ops.project(2, x, views)
    arrays = [x, ops.add_mixed(0, x, ops.recur(0, x, views)), ops.add_mlp(0, x), ops.head(x)]
    assert shapes == [(7, 512)] * 5 + [(14, 512), (7, 512)]
    assert {array.dtype for array in arrays + views.arrays} == {mx.float16}
    wide, layer = x.astype(mx.float32), reference.layers[0]
    wanted = wide + layer.mlp(layer.post_attention_layernorm(wide))
    assert spread(arrays[2].astype(mx.float32), wanted) < 1e-2
    assert spread(arrays[3].astype(mx.float32), reference.language_model.lm_head(wide)) < 1e-2
    assert checkpoint.dtype == "F16"
