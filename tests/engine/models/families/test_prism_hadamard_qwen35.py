"""Bonsai 2 is read as its pack says, or refused by a field's name, and says what mlx-lm says."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import mlx.core as mx
import pytest

from engine.models.checkpoint import promised_checkpoint, read_checkpoint
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.mlx_ops import MlxOps
from engine.models.safetensors_headers import CheckpointError
from engine.planning.memory import own_packing, read_shape, weights_bytes
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
    # On a CPU a matrix with a plain one beside it would be packed as plain numbers.
    assert promised_checkpoint(tmp_path).packed_bytes < 15e9
    assert replace(spec, family="Qwen3.5", blocks=()) == read_spec(ModelConfig(plain))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 3}, "schema_version is 3; it must be 2 or 1"),
        ({"gdn_activation_layout": "tiled"}, "gdn_activation_layout is 'tiled'; it must be group"),
        ({"modules": []}, "modules is no list"),
        ({"modules": [3]}, r"modules\[0\].path is None; it must be a new layer"),
        ({"modules": [FIRST, FIRST]}, r"modules\[1\].path is lm_head; it must be a new"),
        ({"modules": [FIRST | {"block": 2048}]}, r"\].block is 2048; it must be 0 or 512 or 1024"),
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
        (mx.full((1024,), 2.0), "down_proj.signs has other numbers than 1 and -1"),
        (mx.full((1024,), float("nan")), "down_proj.signs has other numbers than 1 and -1"),
    ],
    ids=["short", "twos", "nan"],
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


def test_a_cpu_packs_one_matrix_at_a_time(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_bonsai(tmp_path))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ours(checkpoint)
    assert mx.get_peak_memory() - before < checkpoint.stored_bytes // 3


@pytest.mark.parametrize("packed", [False, True], ids=["MLX", "packed"])
@pytest.mark.parametrize("apart", [False, True])
def test_logits_equal_mlx_lms_by_chunks_and_in_company(
    tmp_path: Path, apart: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's operations are in float32 here, which the CPU's cache takes and mlx-lm has."""
    monkeypatch.setattr(MlxOps, "rotated_dtype", mx.float32)
    spec = replace(BONSAI_SPEC, tie_word_embeddings=not apart)
    checkpoint = read_checkpoint(write_bonsai(tmp_path, spec, apart=apart))
    steps = Steps(checkpoint, ours(checkpoint, packed=packed), {1: 90, 2: 30})
    ids, other = prompt(90), prompt(30, 1)
    first = steps.run([(1, 0, ids[:70])], list(range(70)))
    both = steps.run([(2, 0, other), (1, 70, ids[70:])], list(range(50)))
    assert first is not None
    assert both is not None
    reference = load_reference(checkpoint, stored=not packed)
    want, beside = (reference(mx.array([each]))[0].astype(mx.float32) for each in (ids, other))
    assert spread(mx.concatenate([first, both[30:]]), want) < TOLERANCE
    assert spread(both[:30], beside) < TOLERANCE


def test_a_gpu_computes_in_float16_and_rotates_once_what_layers_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack's norms are float32, its matrices of decays are plain."""
    checkpoint, views = read_checkpoint(write_bonsai(tmp_path)), Mock()
    ops = ours(checkpoint, packed=False).ops
    transform = Mock(wraps=mx.hadamard_transform)
    monkeypatch.setattr(mx, "hadamard_transform", transform)
    x = ops.embed(mx.arange(7))
    ops.project(2, x, views)
    ops.recur(0, x, views)
    _, queries, keys, values, _ = views.append.call_args.args
    _, qkv, z, a, b, _ = views.recur.call_args.args
    arrays = [x, ops.add_mixed(0, x, z), ops.add_mlp(0, x), ops.head(x)]
    shapes = [call.args[0].shape for call in transform.call_args_list]
    assert shapes == [(7, 512)] * 5 + [(14, 512), (7, 512)]
    assert {each.dtype for each in (*arrays, queries, keys, values, qkv, z, a, b)} == {mx.float16}
    assert checkpoint.dtype == "F16"
