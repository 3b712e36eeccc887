"""What a model's files say of it, for those who choose one."""

from datetime import UTC, datetime

from engine.models.checkpoint import Checkpoint
from engine.models.config import AFFINE, ModelConfig
from server.catalogue.local_models import DTYPES, LocalModel, digest_of, model_files
from server.protocol.ollama.answer import UNKNOWN, ModelFacts


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
    files = model_files(checkpoint.path)
    return ModelFacts(
        family=str(config.values.get("model_type", UNKNOWN)),
        parameters=checkpoint.num_weights,
        quantization=quantization,
        size_bytes=checkpoint.stored_bytes,
        digest=digest_of(files),
        modified_at=datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC),
        weights_bytes=weights_bytes,
        on_gpu=on_gpu,
    )


def facts_of(model: LocalModel) -> ModelFacts:
    """Return what has been read of a model that can be served."""
    assert model.checkpoint is not None
    packing = model.quantization
    if packing in DTYPES.values():
        packing = model.checkpoint.dtype
    return ModelFacts(
        family=model.family,
        parameters=model.checkpoint.num_weights,
        quantization=packing.replace("-", "") if packing.endswith("-bit") else packing.upper(),
        size_bytes=model.checkpoint.stored_bytes,
        digest=model.digest,
        modified_at=datetime.fromtimestamp(model.modified, UTC),
    )
