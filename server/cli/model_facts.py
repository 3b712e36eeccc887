"""What a model's files say of it, for those who choose one."""

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from engine.models.checkpoint import Checkpoint
from engine.models.config import AFFINE, ModelConfig
from server.protocol.ollama.card import UNKNOWN, ModelFacts

FILES = (".json", ".safetensors")


def model_facts(
    checkpoint: Checkpoint, *, weights_bytes: int = 0, on_gpu: bool = False
) -> ModelFacts:
    """Read them. weights_bytes, on_gpu: of the weights in memory, where they are loaded."""
    config = ModelConfig(checkpoint.path)
    packing = config.quantization("")
    if packing is None:
        quantization = checkpoint.dtype
    else:
        quantization = f"{packing.bits}bit" if packing.mode == AFFINE else packing.mode.upper()
    files = sorted(file for file in checkpoint.path.iterdir() if file.suffix in FILES)
    return ModelFacts(
        family=str(config.values.get("model_type", UNKNOWN)),
        parameters=checkpoint.num_weights,
        quantization=quantization,
        size_bytes=checkpoint.stored_bytes,
        digest=_digest(files),
        modified_at=datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC),
        weights_bytes=weights_bytes,
        on_gpu=on_gpu,
    )


def _digest(files: Iterable[Path]) -> str:
    """Hash what tells one model from another in an instant: small files whole, and of weights
    their names and sizes."""
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name} {file.stat().st_size}\n".encode())
        if file.suffix == ".json":
            found.update(file.read_bytes())
    return found.hexdigest()
