"""Random models that never end an answer by themselves, and whose every token is whole text."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.bench.gguf import EMBEDDING, write_gguf
from tests.models import ModelSpec, write_model
from tests.published import PUBLISHED, Published

SERVING = ModelSpec(vocab_size=1024)
# Huggingface's Qwen/Qwen3-0.6B.
QWEN3_0_6B = ModelSpec(
    num_hidden_layers=28,
    hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
)
QUANTISED_BITS, QUANTISED_GROUP = 4, 64
ROUTER_BITS = 8
ASCII = 128
Weights = dict[str, mx.array]
Config = dict[str, Any]
# What the chat template puts around a question: its roles, byte by byte, and its special tokens.
TEMPLATE_TOKENS = 19


A3B = PUBLISHED["Qwen3-30B-A3B"]
# Answers have no end only where the embedding is the head.
KINDS = {
    "qwen3-0.6b": Published(QWEN3_0_6B),
    "qwen3.5-0.8b": PUBLISHED["Qwen3.5-0.8B"],
    "qwen3-30b-a3b-eighth": replace(
        A3B, spec=replace(A3B.spec, num_hidden_layers=6, tie_word_embeddings=True)
    ),
}
"""Models that servers are compared on."""


def write_endless_model(
    folder: Path, spec: ModelSpec, dtype: str = "float32", **fields: Any
) -> Path:
    """A model folder with tied embeddings. fields: as for write_model.

    A row of zeros in the tied embedding gives a logit of exactly 0, which is never the largest of
    dozens of random ones. All are such but letters and signs of one byte, because other tokens end
    an answer, open a reasoning part, are held back as half a character, or are other tokens when a
    client sends their text back.
    """
    assert spec.tie_word_embeddings
    write_model(folder, spec, dtype=dtype, **fields)
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    assert isinstance(weights, dict)
    silent = ~mx.array(_letters(spec.vocab_size))
    (name,) = (name for name in weights if name.endswith(EMBEDDING))
    weights[name] = mx.where(silent[:, None], 0.0, weights[name])
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    return folder


class ModelStore:
    """The same weights in several forms, below one folder: made once, used by every run after."""

    def __init__(self, folder: Path, kind: Published) -> None:
        self._folder = folder
        self._kind = kind

    @property
    def is_read_whole(self) -> bool:
        """Whether a token's step reads all weights, and not those of chosen experts alone."""
        return "num_experts" not in self._kind.fields

    def bfloat16(self) -> Path:
        """As published."""

        def write(folder: Path) -> None:
            write_endless_model(folder, self._kind.spec, "bfloat16", **self._kind.fields)

        return self._made("-bfloat16", write)

    def quantised(self) -> Path:
        """MLX's 4 bits in groups of 64."""
        return self._made("-4-bit", lambda folder: quantise(self.bfloat16(), folder))

    def gguf(self) -> Path:
        """As published, for llama.cpp. Raises ImportError without the package ``gguf``."""
        return self._made(".gguf", lambda file: write_gguf(self.bfloat16(), file))

    def gguf_quantised(self, llama_quantize: Path) -> Path:
        """llama.cpp's 4 bits in groups of 32, as its own program makes them: an embedding that is
        the head too has 6. Raises ImportError, and CalledProcessError."""

        def write(file: Path) -> None:
            command = [str(llama_quantize), str(self.gguf()), str(file), "q4_0"]
            subprocess.run(command, check=True, capture_output=True)

        return self._made("-q4_0.gguf", write)

    def _made(self, ending: str, write: Callable[[Path], object]) -> Path:
        """Whole or not at all, so that an interrupted run leaves nothing that looks right."""
        dimensions = "-".join(str(number) for number in asdict(self._kind.spec).values())
        family = self._kind.fields.get("model_type", "qwen3")
        path = self._folder / f"{family}-{dimensions}{ending}"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as made:
                write(Path(made) / path.name)
                (Path(made) / path.name).rename(path)
        return path


def quantise(source: Path, made: Path) -> Path:
    """The same model with MLX's 4 bits, of every matrix."""
    shutil.copytree(source, made, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    packed = _quantised(weights, config)
    mx.save_safetensors(str(made / "model.safetensors"), packed, {"format": "mlx"})
    (made / "config.json").write_text(json.dumps(config, indent=1))
    return made


def _quantised(weights: Weights, config: Config) -> Weights:
    """Every matrix, the embedding among them; routers in 8 bits, as mlx-lm has them. config gets
    what it takes to read them."""
    quantization: Config = {"group_size": QUANTISED_GROUP, "bits": QUANTISED_BITS}
    packed: Weights = {}
    for name, array in weights.items():
        if array.ndim < 2 or "conv1d" in name:
            packed[name] = array
            continue
        module, bits = name.removesuffix(".weight"), QUANTISED_BITS
        if module.endswith(".mlp.gate"):
            bits = ROUTER_BITS
            quantization[module] = {"group_size": QUANTISED_GROUP, "bits": bits}
        parts = mx.quantize(array, QUANTISED_GROUP, bits)
        for part, values in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[f"{module}.{part}"] = values
    config["quantization"] = quantization
    return packed


def weight_bytes(model: Path) -> int:
    """Of all weights: what a token's step reads once, since a tied embedding is the head too.
    model: a folder, or a GGUF file."""
    files = list(model.glob("*.safetensors")) if model.is_dir() else [model]
    return sum(file.stat().st_size for file in files)


def _letters(vocab_size: int) -> list[bool]:
    """Which tokens are printable ASCII: the byte-level alphabet, sorted, begins with them."""
    printable = ASCII - ord("!") - 1
    return [number < printable for number in range(vocab_size)]
