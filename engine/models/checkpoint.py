"""Checks before loading that a model folder's files have the tensors that config.json needs."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.models.config import ModelConfig, Quantization
from engine.models.draft_head import (
    PREFIXES,
    UNREAD,
    StoredHead,
    companion_head,
    head_beside,
    names_head,
    own_head,
)
from engine.models.expert_tensors import headers_by_mlx, refuse_unread_experts
from engine.models.families import read_spec
from engine.models.safetensors_headers import (
    CheckpointError,
    Tensor,
    read_index,
    read_json,
    read_json_list,
    read_tensors,
)
from engine.models.spec import ModelSpec
from engine.models.tensors import (
    DRAFT_NAMINGS,
    EMBEDDING,
    HEAD,
    NAMINGS,
    ModelTensors,
    Naming,
    check_tensors,
    grouped_tensors,
    model_tensors,
    naming_of,
    packed_bytes,
)

MODULES_FILE = "modules.json"
BARE_NAME = f"{EMBEDDING}.weight"
HEAD_NAME = f"{HEAD}.weight"
COMPUTED = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def is_embedding_checkpoint(path: Path, names: Collection[str], *, tied: bool) -> bool:
    """Return True if a model makes vectors instead of answers. With ``tied``, the embedding is also
    the output head. Raises CheckpointError for a kind of vectors that quire does not compute."""
    if (path / MODULES_FILE).is_file():
        check_modules(path)
        return True
    return BARE_NAME in names or not (tied or any(name.endswith(HEAD_NAME) for name in names))


def check_modules(path: Path) -> None:
    file = path / MODULES_FILE
    modules = read_json_list(file)
    kinds = [_kind(module) for module in modules]
    if kinds not in COMPUTED:
        raise CheckpointError(
            f"{file}: the modules are {', '.join(kinds) or 'none'}; quire serves Transformer, "
            "Pooling and Normalize"
        )
    settings = path / str(modules[1].get("path")) / "config.json"
    modes = _pooling_modes(read_json(settings))
    if modes != {"lasttoken"}:
        raise CheckpointError(
            f"{settings}: the pooling is {', '.join(sorted(modes)) or 'none'}; quire serves "
            "lasttoken"
        )


def _kind(module: Any) -> str:
    kind = module.get("type") if isinstance(module, dict) else None
    return str(kind).rpartition(".")[2]


def _pooling_modes(settings: dict[str, Any]) -> set[str]:
    """Return a settings file's pooling modes. New files name the modes; old files set flags."""
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        return set(named.split("+"))
    flags = {name for name, value in settings.items() if value is True}
    return {name.removeprefix("pooling_mode_") for name in flags if "pooling_mode_" in name}


__all__ = ["Checkpoint", "CheckpointError", "read_checkpoint"]

# The ending of the names of RoPE's frequencies in older files. quire computes the frequencies.
FREQUENCIES = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked model folder."""

    path: Path
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The dtype of a GPU's activations: "F32", "BF16" or "F16"."""
    stored_bytes: int
    packed_bytes: int
    """The bytes of all tensors after packing for the CPU's kernels."""
    num_weights: int
    """The count of numbers in all weights. Scales and biases of quantization do not count."""
    embeds: bool
    """Whether the model makes vectors of texts instead of answers."""
    naming: Naming
    unread: tuple[str, ...]
    """The names of stored tensors that serving does not need."""
    packings: Mapping[str, Quantization]
    draft_naming: Naming = DRAFT_NAMINGS[0]
    draft_files: tuple[Path, ...] = ()
    """The files of a draft head that are not the checkpoint's own files."""
    draft_problem: str | None = None
    """Why a draft head that was found is not served."""

    @property
    def quantized(self) -> bool:
        """Whether a layer is quantized. The draft head's layers do not count."""
        return any(not layer.startswith(self.draft_naming.prefix) for layer in self.packings)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def left_out(self) -> str | None:
        """Return a sentence that names the unserved parts of the model, or None if it has none."""
        known = self.spec.unread if self.spec.draft else (*self.spec.unread, *UNREAD)
        uses = Counter(
            use for name in self.unread for start, use in known if name.startswith(start)
        )
        parts = {use: [f"{count} tensor{'s' * (count != 1)}"] for use, count in uses.items()}
        if self.draft_problem is not None:
            parts.setdefault(UNREAD[0][1], []).append(self.draft_problem)
        if not parts:
            return None
        words = ", ".join(f"{use} ({'; '.join(parts[use])})" for use in sorted(parts))
        return f"{self.spec.family} is served without what its files have for {words}"

    def without_draft_head(self, why: str) -> "Checkpoint":
        """Read the checkpoint again, without its draft head. ``why`` says why, in ``left_out``."""
        return replace(read_checkpoint(self.path, embeds=False, drafts=False), draft_problem=why)

    @property
    def tensors(self) -> ModelTensors:
        return tensors_of(self.spec, self.naming, self.draft_naming, embeds=self.embeds)


def read_checkpoint(
    path: Path, *, embeds: bool | None = None, draft: Path | None = None, drafts: bool = True
) -> Checkpoint:
    """Check a model folder. With ``embeds``, the model makes vectors; with None, the files decide.
    With ``drafts``, a model of answers gets its draft head, from the companion's folder ``draft``
    or else from its own folder. Raises CheckpointError, which names the file and field."""
    config = ModelConfig(path)
    spec = read_spec(config)
    tensors = headers_by_mlx(read_tensors(path))
    if "tie_word_embeddings" not in config.text.values:
        has_head = any(name.endswith(HEAD_NAME) for name in tensors)
        spec = replace(spec, tied_embeddings=spec.tied_embeddings and not has_head)
    if embeds is None:
        embeds = is_embedding_checkpoint(path, tensors, tied=spec.tied_embeddings)
    needless = (*(start for start, _ in spec.unread), *PREFIXES)
    read = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(needless) and not name.endswith(FREQUENCIES)
    }
    naming = naming_of(read)
    refuse_unread_experts(path, naming.experts, read)
    model = tensors_of(spec, naming, embeds=embeds)
    tolerated = {f"{naming.head}.weight"} if model.head is None else set()
    packings = check_tensors(config, spec.family, model.shapes, read, tolerated)
    head, problem = None, None
    if drafts and not embeds and draft is not None:
        head = companion_head(draft, spec)
    elif drafts and not embeds and (head := own_head(config, spec, tensors, naming)) is None:
        try:
            head = head_beside(config, spec)
        except CheckpointError as error:
            problem = str(error)
    own = {*read, *(() if head is None or head.files else head.tensors)}
    unread = tuple(name for name in tensors if name not in own)
    how: dict[str, Any] = {"embeds": embeds, "naming": naming, "unread": unread, "draft": head}
    return replace(checkpoint_of(config, spec, read, packings, **how), draft_problem=problem)


def checkpoint_of(
    config: ModelConfig,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    packings: Mapping[str, Quantization],
    *,
    embeds: bool,
    naming: Naming = NAMINGS[0],
    unread: tuple[str, ...] = (),
    draft: StoredHead | None = None,
) -> Checkpoint:
    """Return a checkpoint with computed sizes. ``tensors`` has the tensors that serving reads,
    without those of the draft head."""
    path, draft_naming = config.file.parent, DRAFT_NAMINGS[0]
    if draft is not None:
        spec, draft_naming = spec.with_draft_head(), draft.naming
        tensors, packings = {**tensors, **draft.tensors}, {**packings, **draft.packings}
    model = tensors_of(spec, naming, draft_naming, embeds=embeds)
    return Checkpoint(
        path=path,
        spec=spec,
        eos_token_ids=_eos_token_ids(path, config),
        dtype="F16" if spec.blocks else tensors[f"{model.norm.name}.weight"].dtype,
        stored_bytes=sum(tensor.stored_bytes for tensor in tensors.values()),
        packed_bytes=packed_bytes(model, tensors, packings.get),
        num_weights=model.count(1) + model.count(2),
        embeds=embeds,
        naming=naming,
        unread=unread,
        packings=packings,
        draft_naming=draft_naming,
        draft_files=() if draft is None else draft.files,
    )


def tensors_of(
    spec: ModelSpec, naming: Naming = NAMINGS[0], draft: Naming = DRAFT_NAMINGS[0], *, embeds: bool
) -> ModelTensors:
    """Return the tensors of a checkpoint. A model that makes vectors (``embeds``) has no head."""
    return model_tensors(spec, naming, draft, with_head=not (spec.tied_embeddings or embeds))


def _eos_token_ids(path: Path, config: ModelConfig) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = config.text.values.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{config.file}: eos_token_id is {eos!r}; it must be token ids")
    return tuple(ids)


DTYPES = {"float32": "F32", "float16": "F16"}


def promised_checkpoint(
    path: Path,
    stored_bytes: int | None = None,
    *,
    embeds: bool | None = None,
    drafts: bool = True,
    head: bool = False,
) -> Checkpoint:
    """Predict the checkpoint of a folder whose weights are not downloaded, from ``config.json``.

    ``stored_bytes`` is the size of the weights' files, if known. With ``embeds``, the model makes
    vectors; with None, the files decide. With ``drafts``, a model of answers has a draft head if
    the index names one, or if ``head`` is True. Raises CheckpointError, which names the file and
    field.
    """
    config = ModelConfig(path)
    spec, index = read_spec(config), read_index(path)
    if embeds is None:
        embeds = is_embedding_checkpoint(path, index or {HEAD_NAME}, tied=spec.tied_embeddings)
    if drafts and not embeds and (head or names_head(index)):
        spec = spec.with_draft_head()
    model = tensors_of(spec, embeds=embeds)
    tensors = promised_tensors(config, model)
    layers = (name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
    packings = {layer: packing for layer in layers if (packing := config.quantization(layer))}
    promised = checkpoint_of(config, spec, tensors, packings, embeds=embeds)
    if stored_bytes is None:
        return promised
    # The files may also have a head that is never read. If they are larger than all tensors with
    # this head, assume that weights have more bits than config.json says.
    embedding = f"{model.embedding.name}."
    unread = sum(t.stored_bytes for name, t in tensors.items() if name.startswith(embedding))
    foreseen = promised.stored_bytes + (unread if model.head is None else 0)
    packed_bytes = promised.packed_bytes + max(0, stored_bytes - foreseen)
    return replace(promised, stored_bytes=stored_bytes, packed_bytes=packed_bytes)


def promised_tensors(config: ModelConfig, model: ModelTensors) -> dict[str, Tensor]:
    values = config.text.values
    dtype = DTYPES.get(str(values.get("dtype") or values.get("torch_dtype")), "BF16")
    tensors: dict[str, Tensor] = {}
    for name, shape in model.shapes.items():
        layer = name.removesuffix(".weight")
        numbers = len(shape) == 1 or name.endswith(".bias")
        plain = numbers or (model.blocks and layer not in model.blocks)
        packing = None if plain else config.quantization(layer)
        if packing is None or shape[-1] % packing.group_size:
            tensors[name] = Tensor("", dtype, shape)
            continue
        for part, (part_dtype, part_shape) in grouped_tensors(shape, packing, dtype).items():
            tensors[f"{layer}.{part}"] = Tensor("", part_dtype, part_shape)
    return tensors
