"""Checks a model folder before anything of it is loaded.

``config.json`` says which tensors there must be, the files' headers say which there are.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.models.config import ModelConfig, Quantization
from engine.models.embedding_checkpoint import HEAD_NAME, is_embedding_checkpoint
from engine.models.expert_tensors import refuse_grouped_apart
from engine.models.families import read_spec
from engine.models.safetensors_headers import (
    CheckpointError,
    Tensor,
    read_json,
    read_tensors,
)
from engine.models.spec import ModelSpec
from engine.models.tensors import (
    NAMINGS,
    ModelTensors,
    Naming,
    check_tensor,
    model_tensors,
    naming_of,
    packed_bytes,
)

__all__ = ["Checkpoint", "CheckpointError", "read_checkpoint"]

# What older files keep of RoPE beside its base, from which it follows.
FREQUENCIES = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that has been found complete."""

    path: Path
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Of the float tensors: "F32", "BF16" or "F16"."""
    stored_bytes: int
    """Of all tensors as they are stored."""
    packed_bytes: int
    """Of all tensors as the CPU's kernels read them."""
    num_weights: int
    """Numbers of all weight matrices, however they are packed."""
    embeds: bool
    """Whether it makes vectors of texts, and generates nothing."""
    naming: Naming
    """How its tensors are named."""
    unread: tuple[str, ...]
    """Tensors of its files that serving it does not need."""
    packings: Mapping[str, Quantization]
    """How layers are packed, by their names, where they are."""

    @property
    def vocab_size(self) -> int:
        """Return how many tokens the model knows."""
        return self.spec.vocab_size

    @property
    def left_out(self) -> str | None:
        """Return what of its files is not served, as a sentence; None where all is."""
        uses = Counter(
            use for name in self.unread for start, use in self.spec.unread if name.startswith(start)
        )
        if not uses:
            return None
        parts = (
            f"{use} ({count} tensor{'s' * (count != 1)})" for use, count in sorted(uses.items())
        )
        return f"{self.spec.family} is served without what its files have for {', '.join(parts)}"

    @property
    def tensors(self) -> ModelTensors:
        """Return the tensors that the model consists of."""
        return tensors_of(self.spec, self.naming, embeds=self.embeds)


def read_checkpoint(path: Path, *, embeds: bool | None = None) -> Checkpoint:
    """Check a folder. embeds: whether it makes vectors; None: as its files say.

    Raises CheckpointError with one sentence that names file and field.
    """
    config = ModelConfig(path)
    spec = read_spec(config)
    tensors = read_tensors(path)
    if "tie_word_embeddings" not in config.text.values:
        has_head = any(name.endswith(HEAD_NAME) for name in tensors)
        spec = replace(spec, tied_embeddings=spec.tied_embeddings and not has_head)
    if embeds is None:
        embeds = is_embedding_checkpoint(path, tensors, tied=spec.tied_embeddings)
    read = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(spec.unread_prefixes) and not name.endswith(FREQUENCIES)
    }
    unread = tuple(name for name in tensors if name not in read)
    naming = naming_of(read)
    refuse_grouped_apart(path, naming.experts, read)
    model = tensors_of(spec, naming, embeds=embeds)
    packings: dict[str, Quantization] = {}
    for name, shape in model.shapes.items():
        if packing := check_tensor(config, name, shape, tensors):
            packings[name.removesuffix(".weight")] = packing
    tolerated = {f"{naming.head}.weight"} if model.head is None else set()
    for name, its in read.items():
        of_groups = name.endswith((".scales", ".biases"))
        if not (name in model.shapes or of_groups or name in tolerated):
            raise CheckpointError(
                f"{path / its.file}: the tensor {name} has no place in a {spec.family} model"
            )
    return checkpoint_of(config, spec, read, packings, embeds=embeds, naming=naming, unread=unread)


def checkpoint_of(
    config: ModelConfig,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    packings: Mapping[str, Quantization],
    *,
    embeds: bool,
    naming: Naming = NAMINGS[0],
    unread: tuple[str, ...] = (),
) -> Checkpoint:
    """Return what weights amount to. tensors: what the files hold, without what is not read.
    packings: of the layers that are packed."""
    path = config.file.parent
    model = tensors_of(spec, naming, embeds=embeds)
    return Checkpoint(
        path=path,
        spec=spec,
        eos_token_ids=_eos_token_ids(path, config),
        dtype=tensors[f"{model.norm.name}.weight"].dtype,
        stored_bytes=sum(tensor.stored_bytes for tensor in tensors.values()),
        packed_bytes=packed_bytes(model, tensors, packings.get),
        num_weights=model.count(1) + model.count(2),
        embeds=embeds,
        naming=naming,
        unread=unread,
        packings=packings,
    )


def tensors_of(spec: ModelSpec, naming: Naming = NAMINGS[0], *, embeds: bool) -> ModelTensors:
    """Return the tensors of a checkpoint. One that makes vectors has no head."""
    return model_tensors(spec, naming, with_head=not (spec.tied_embeddings or embeds))


def _eos_token_ids(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end a generation: generation_config.json's, else config.json's."""
    generation = path / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.exists() else None
    if found is None:
        found = config.text.values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{config.file}: eos_token_id is {found!r}; it must be token ids")
    return tuple(ids)
