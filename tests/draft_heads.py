"""Random draft heads (multi-token prediction) for made checkpoints, as MLX or the hub has them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.models.checkpoint import read_checkpoint
from engine.models.expert_tensors import ExpertMatrix
from engine.models.tensors import Matrix, Naming, Part, model_tensors

DTYPES = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}


def write_head(
    folder: Path,
    file: str = "mtp.safetensors",
    *,
    prefix: str = "mtp.",
    less_one: bool = False,
    bits: int | None = None,
    seed: int = 7,
    others: bool = False,
) -> Path:
    """Write a random head for the model in a folder, to a file in that folder. A seed makes the
    same head under all names. prefix: of all names. less_one: whether norms are stored as the hub
    stores hybrids'; the file calls itself MLX's all the same. bits: of matrices, in groups of 32.
    others: whether the file has a tensor of a model as well, as quire reads none."""
    arrays = head_arrays(folder, bits=bits, seed=seed)
    if less_one:
        arrays |= {name: each - 1 for name, each in arrays.items() if "norm" in name}
    named = {f"{prefix}{name}": each for name, each in arrays.items()}
    named |= {"model.norm.weight": mx.ones((3,), mx.int8)} if others else {}
    mx.eval(named)
    (folder / file).parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / file), named, {"format": "mlx"})
    return folder


def write_companion(folder: Path, model: Path, *, bits: int | None = None, **how: Any) -> Path:
    """Write a folder that has the head of a model alone, with a config of its own, as mlx-vlm
    splits it off. how: as for write_head."""
    write_head(model, "companion.safetensors", **({"prefix": ""} | how), bits=bits)
    folder.mkdir()
    (model / "companion.safetensors").rename(folder / "model.safetensors")
    config: dict[str, Any] = {"model_type": "qwen3_5_mtp", "block_size": 3}
    if bits is not None:
        config["quantization"] = {"bits": bits, "group_size": 32, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def head_arrays(folder: Path, *, bits: int | None = None, seed: int = 7) -> dict[str, mx.array]:
    """Return a random head of the model in a folder: MLX's names without a prefix. Norms are near
    1, but those of queries and keys near 1.75 for hybrids, as Qwen's are."""
    checkpoint = read_checkpoint(folder, drafts=False)
    spec = checkpoint.spec.with_draft_head()
    head = model_tensors(spec, draft=Naming(""), with_head=False).draft
    assert head is not None
    dtype, arrays = DTYPES[checkpoint.dtype], dict[str, mx.array]()
    for number, part in enumerate(head.parts):
        shifts = bool(spec.recurrences) and part.name.endswith(("q_norm", "k_norm"))
        mean = 1.75 if shifts else 1
        arrays |= _random(part, dtype, bits, mean, mx.random.key(1000 * seed + number))
    return arrays


def _random(
    part: Part, dtype: mx.Dtype, bits: int | None, mean: float, key: mx.array
) -> dict[str, mx.array]:
    ((name, shape),) = part.shapes().items()
    numbers = mx.random.normal(shape, key=key)
    if not isinstance(part, Matrix | ExpertMatrix):  # exact in 16 bits, less one as well
        return {name: (mean + mx.round(20 * numbers) / 64).astype(dtype)}
    matrix = (numbers * shape[-1] ** -0.5).astype(dtype)
    if bits is None:
        return {name: matrix}
    codes, scales, biases = mx.quantize(matrix, group_size=32, bits=bits)
    layer = name.removesuffix("weight")
    return {name: codes, f"{layer}scales": scales, f"{layer}biases": biases}
