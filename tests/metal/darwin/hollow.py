"""Checkpoints of real sizes whose weights are a hole in a file: enough to be planned for."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from tests.models import QWEN3_4B, ModelSpec, write_config, write_tokenizer

QUANTISED = {"group_size": 64, "bits": 4}
NAMES = {mx.uint32: "U32", mx.bfloat16: "BF16"}
# Huggingface's Qwen/Qwen3-8B and Qwen3-14B.
QWEN3_8B = ModelSpec(36, 4096, 32, 8, 128, 12288, 151936, tie_word_embeddings=False)
QWEN3_14B = ModelSpec(40, 5120, 40, 8, 128, 17408, 151936, tie_word_embeddings=False)
MODELS = {"Qwen3-4B": QWEN3_4B, "Qwen3-8B": QWEN3_8B, "Qwen3-14B": QWEN3_14B}


def write_hollow_model(folder: Path, spec: ModelSpec) -> Path:
    """A model's folder, its weights in MLX's 4 bits. Nothing can be computed with it."""
    from mlx_lm.models.qwen3 import Model, ModelArgs

    write_config(folder, spec, quantization=QUANTISED)
    write_tokenizer(folder, 1024)
    model = Model(ModelArgs.from_dict(json.loads((folder / "config.json").read_text())))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, **QUANTISED)
    # Shapes are known before anything is computed.
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, array in tree_flatten(model.parameters()):
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
