"""Lists the models on this disk: in configured folders, in the Hugging Face hub's cache, and in LM
Studio's folder.

Only config.json, model.safetensors.index.json and headers of weight files are read. A process with
limits opens and checks the files: see folder_reader.py."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from engine.models.checkpoint import Checkpoint, CheckpointError, promised_checkpoint
from engine.models.config import AFFINE, ModelConfig
from engine.models.safetensors_headers import MAX_JSON_BYTES
from engine.planning.memory import read_shape
from kvcache.budget import gib
from server.catalogue.companions import Heads, companion_among, read_with_head
from server.catalogue.folder_reader import FolderReader
from server.catalogue.foreign_files import (
    CONFIG_FILE,
    SNAPSHOTS,
    foreign_weights,
    refuse_foreign_files,
    refuse_pointers,
)
from server.catalogue.hub_cache import (
    best_snapshot,
    cached_repositories,
    folders_in,
    lacks_weights,
    listed_weights,
    missing_weights,
    part_bytes,
    repository_folder,
    snapshot_of,
)
from server.catalogue.lm_studio import lm_studio_folders
from server.catalogue.names import (
    DEMO_ID,
    GGUF,
    MAX_PROBLEM_CHARS,
    MAX_WORD_CHARS,
    ModelNotFoundError,
    printable,
)
from server.shipped import DEMO_MODEL, shipped
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerError

TOKENIZER_FILE = "tokenizer.json"
# Suffixes of files with weights, including those that quire cannot read.
WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf", ".bin", ".npz", ".pt", ".pth"})
MAX_CHARS = {"family": MAX_WORD_CHARS, "quantization": MAX_WORD_CHARS, "problem": MAX_PROBLEM_CHARS}
DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
CONFIG_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Place(NamedTuple):
    """Where a model is: in a folder, or in a repository of the hub."""

    name: str
    """``org/name`` on the hub. Otherwise the folder's name, or the last two parts of its path."""
    folder: Path | None = None
    """A folder outside the hub's cache, or None for a repository, whether it is cached or not."""
    revision: str | None = None
    """A branch, tag or commit of the repository. None means the best cached one, or main."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this disk. It can be served unless ``problem`` is set."""

    name: str
    """The name of the model's Place."""
    folder: Path
    size_bytes: int
    """Size of all of the model's weight files on this disk."""
    modified: float
    """Modification time of the newest weight file, in Unix seconds."""
    revision: str | None
    """The commit on the hub, or None for a model outside the hub's cache."""
    family: str = ""
    """The field model_type of config.json, which may be empty."""
    parameters: int = 0
    """The number of parameters of the model, or 0 if quire does not support the family."""
    quantization: str = ""
    """The format of the matrices, such as "4-bit", "mxfp4" or "bf16". Empty if unknown."""
    max_position_embeddings: int = 0
    """The longest sequence in tokens, or 0 if quire does not support the family."""
    embeds: bool = False
    """True if the model turns texts into vectors, and generates no text."""
    problem: str | None = None
    """A sentence that says why the model cannot be served, or None if it can be."""
    digest: str = ""
    """64 hexadecimal digits that change with the files. Empty if the model cannot be served."""
    checkpoint: Checkpoint | None = None
    """The sizes of the weights, or None if the model cannot be served."""


AS_JSON = TypeAdapter(LocalModel)
"""Converts a LocalModel to and from the JSON that the reading process sends."""
Facts = dict[str, Any]


def local_models(
    folders: Sequence[Path], *, hub: bool = True, reader: FolderReader | None = None
) -> tuple[LocalModel, ...]:
    """Return the models on this disk, sorted by name. Search ``folders`` in order; if ``hub`` is
    True, search the hub's cache and LM Studio's folder, too. Of models with the same name, return
    the first that can be served. A folder may be a model, contain models one or two levels below,
    or be missing. ``reader`` stores results for later calls."""
    if reader is None:
        with FolderReader() as reader:
            return local_models(folders, hub=hub, reader=reader)
    by_name: dict[str, LocalModel] = {}
    seen: set[Path] = set()
    places = [*places_here(folders, hub=hub)]
    others = places if hub else [*places_here(())]
    for place in places:
        companion = companion_among((*places, *others), place.folder or place.name)
        if (model := model_here(place, reader, companion)) is None:
            continue
        folder = model.folder.resolve()
        before = by_name.get(model.name)
        if folder not in seen and (before is None or (before.problem and not model.problem)):
            by_name[model.name] = model
        seen.add(folder)
    return tuple(sorted(by_name.values(), key=lambda model: model.name.lower()))


def model_here(
    place: Place, reader: FolderReader, companion: str | None = None
) -> LocalModel | None:
    """Return the model in a place, or None if nothing of it is on this disk. ``companion``: as in
    ``Heads``."""
    name, folder, revision = place
    read = partial(_read, reader, Heads(reader.drafts, companion=companion))
    if folder is not None:
        return read(read_model, folder, name, None)
    if revision is not None:
        snapshot = snapshot_of(name, revision)
        return read(read_model, snapshot, name, snapshot.name) if snapshot else None
    repository = repository_folder(name)
    is_here = bool(folders_in(repository / SNAPSHOTS))
    return read(read_repository, repository, name, "") if is_here else None


def _read(
    reader: FolderReader, heads: Heads, work: Any, folder: Path, name: str, revision: str | None
) -> LocalModel:
    """Return the model in a folder. A reading error becomes the model's problem. ``revision`` is
    the commit on the hub, None outside the hub's cache, or "" if ``work`` chooses the commit."""
    how = revision, reader.embeds, *heads
    try:
        return AS_JSON.validate_python(reader.read(work, folder, name, *how))
    except CheckpointError as error:
        return _model_of(name, folder, revision, {"problem": _problem(name, folder, error)})


def places_here(folders: Sequence[Path], *, hub: bool = True) -> Iterator[Place]:
    for folder in folders:
        yield from _model_folders(folder.expanduser().absolute())
    if hub:
        yield from map(Place, cached_repositories())
        for publisher in itertools.chain(*map(folders_in, lm_studio_folders())):
            yield from _models_below(publisher)


def _model_folders(folder: Path) -> Iterator[Place]:
    if _is_model(folder):
        is_demo = folder.resolve() == shipped(DEMO_MODEL).resolve()
        yield Place(DEMO_ID if is_demo else folder.resolve().name, folder)
        return
    for below in folders_in(folder):
        if _is_model(below):
            yield Place(below.name, below)
        else:
            yield from _models_below(below)


def _models_below(publisher: Path) -> Iterator[Place]:
    for model in folders_in(publisher):
        if _is_model(model):
            yield Place(f"{publisher.name}/{model.name}", model)


def _is_model(folder: Path) -> bool:
    """Return True if a folder has a config.json or a file with weights."""
    return (folder / CONFIG_FILE).is_file() or bool(_weights_in(folder))


def _weights_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix.lower() in WEIGHT_SUFFIXES]
    except OSError:
        return []


def read_repository(folder: str, repository: str, _: str, *how: Any) -> Any:
    """Read the best commit of a repository in the hub's cache, as ``read_model`` does."""
    snapshot = best_snapshot(repository)
    assert snapshot is not None, folder
    return read_model(str(snapshot), repository, snapshot.name, *how)


def read_model(path: str, name: str, revision: str | None, embeds: bool | None, *heads: Any) -> Any:
    """Read a model's folder, and return a LocalModel as AS_JSON dumps it. An error becomes the
    model's problem, so that other models are still listed. ``heads`` are the values of Heads."""
    folder, facts = Path(path), Facts()
    try:
        for more in _read_facts(name if revision else None, folder, embeds, Heads(*heads)):
            facts |= more
    except Exception as error:
        # Malformed files can cause errors of any kind.
        facts["problem"] = _problem(name, folder, error)
    return AS_JSON.dump_python(_model_of(name, folder, revision, facts), mode="json")


def _model_of(name: str, folder: Path, revision: str | None, facts: Facts) -> LocalModel:
    size_bytes: int = facts.pop("part_bytes", 0)
    try:
        stats = [path.stat() for path in _weights_in(folder) if path.exists()]
        size_bytes += sum(stat.st_size for stat in stats)
        modified = max((stat.st_mtime for stat in stats), default=folder.stat().st_mtime)
    except OSError:  # the folder was removed meanwhile, or is unreadable
        size_bytes, modified = 0, 0.0
    for field, max_chars in MAX_CHARS.items():
        if field in facts:
            facts[field] = printable(facts[field], max_chars)
    return LocalModel(name, folder, size_bytes, modified, revision, **facts)


def _problem(name: str, folder: Path, error: Exception) -> str:
    if isinstance(error, CheckpointError | ModelNotFoundError):
        problem = str(error).replace(f"{folder}/", "").removeprefix(f"{folder}: ")
        return problem.removeprefix(f"{name}: ")
    return f"its files cannot be read: {type(error).__name__}: {error}"


def _read_facts(
    repository: str | None, folder: Path, embeds: bool | None, heads: Heads
) -> Iterator[Facts]:
    """Yield values for the fields of LocalModel. Readings that are likelier to fail come later.
    ``repository`` is None outside the hub's cache. Raises CheckpointError and any reading error."""
    foreign = foreign_weights(folder)
    if foreign or not (folder / CONFIG_FILE).exists():
        yield {"problem": foreign or f"there is no {CONFIG_FILE}"}
        yield {"quantization": "gguf" if foreign == GGUF else ""}
        return
    refuse_pointers(folder)
    config = ModelConfig(folder)
    quantization = named_quantization(config.text.values)
    yield {"family": str(config.values.get("model_type") or ""), "quantization": quantization}
    shape = read_shape(folder)
    positions = shape.spec.max_position_embeddings
    yield {"parameters": shape.parameters, "max_position_embeddings": positions}
    missing = missing_weights(repository, folder)
    if missing or (repository and lacks_weights(repository, folder)):
        yield {"embeds": promised_checkpoint(folder, 0).embeds}
        yield _incomplete(repository, folder, missing)
        return
    checkpoint = read_with_head(folder, embeds, heads)
    yield {"embeds": checkpoint.embeds, "quantization": stored_as(checkpoint, quantization)}
    if (folder / TOKENIZER_FILE).is_file():
        yield {"digest": digest_of(model_files(folder)), "checkpoint": checkpoint}
    else:
        yield {"problem": f"{TOKENIZER_FILE}: the file does not exist"}


def _incomplete(repository: str | None, folder: Path, missing: Sequence[str]) -> Facts:
    """Return a sentence about missing weights, and the size of unfinished downloads."""
    files = f"{len(missing)} file{'s' * (len(missing) != 1)} of weights" if missing else "weights"
    verb = "is" if len(missing) == 1 else "are"
    if repository is None:
        return {"problem": f"{files} {verb} missing, such as {missing[0]}"}
    parts, sizes = part_bytes(repository), listed_weights(repository, folder) or {}
    here = parts + sum(size for file, size in sizes.items() if (folder / file).exists())
    problem = f"{files} {verb} not here yet: `quire pull {repository}` fetches what is missing"
    if here and sizes:
        whole = gib(sum(sizes.values()))
        problem = f"{gib(here)} of {whole} are here: `quire pull {repository}` goes on"
    return {"problem": problem, "part_bytes": parts}


def named_quantization(values: dict[str, Any]) -> str:
    """Return the format of the matrices as config.json names it, or an empty text."""
    packing = values.get("quantization")
    if isinstance(packing, dict):
        mode = packing.get("mode", AFFINE)
        return f"{packing.get('bits')}-bit" if mode == AFFINE else str(mode)
    foreign = values.get("quantization_config")
    if isinstance(foreign, dict) and foreign.get("quant_method"):
        return str(foreign["quant_method"])
    return CONFIG_DTYPES.get(str(values.get("dtype") or values.get("torch_dtype")), "")


def stored_as(checkpoint: Checkpoint, named: str) -> str:
    """Return the matrices' format: ``named`` if it is a quantization, else the weights' type."""
    plain = named in CONFIG_DTYPES.values() or not named
    return DTYPES[checkpoint.dtype] if plain else named


def model_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))


def digest_of(files: Iterable[Path]) -> str:
    """Hash JSON files by their contents, but weights only by name and size, which is quick."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode(errors="surrogateescape"))
        if file.suffix == ".json" and size <= MAX_JSON_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def check_folder(
    path: str, embeds: bool | None, promised_bytes: int | None, tokenizer: bool, *heads: Any
) -> None:
    """Raise CheckpointError or TokenizerError if a folder cannot be served. ``promised_bytes``: as
    for ``checkpoint_in``. If ``tokenizer`` is True, check the tokenizer's files, too. ``heads`` are
    the values of Heads."""
    folder = Path(path)
    checkpoint = checkpoint_in(folder, embeds, promised_bytes, Heads(*heads))
    if tokenizer:
        check_vocabulary(folder, Tokenizer(folder), checkpoint)


def check_shape(path: str) -> None:
    """Raise CheckpointError if a model's dimensions cannot be read from its folder."""
    refuse_foreign_files(Path(path))
    read_shape(Path(path))


def checkpoint_in(
    folder: Path, embeds: bool | None, promised_bytes: int | None, heads: Heads
) -> Checkpoint:
    """Read a model's checkpoint (sizes of weights). ``promised_bytes`` is the size of all weights
    if some are still on the hub; then the head is known by its name alone. Raises CheckpointError.
    """
    refuse_foreign_files(folder)
    if promised_bytes is None:
        checkpoint = read_with_head(folder, embeds, heads)
    else:
        known = bool(heads.named or heads.companion or heads.on_hub)
        how: dict[str, Any] = {"drafts": heads.drafts, "head": known}
        checkpoint = promised_checkpoint(folder, promised_bytes, embeds=embeds, **how)
    if checkpoint.embeds and heads.named:
        raise CheckpointError(
            f"{folder}: the model makes vectors of texts, and {heads.named} (--draft) is a head "
            "that drafts answers"
        )
    return checkpoint


def template_facts(path: str) -> tuple[bool, bool, str]:
    """Return three values: True if the chat template writes tool calls, True if the template writes
    thoughts, and the template's text. Raises TokenizerError."""
    template = Tokenizer(Path(path)).template
    return template.tool_format is not None, template.knows_thoughts, template.text


def check_vocabulary(folder: Path, tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Raise TokenizerError if the tokenizer has more tokens than the weights."""
    if tokenizer.vocab_size > checkpoint.vocab_size:
        raise TokenizerError(
            f"{folder / TOKENIZER_FILE}: it has {tokenizer.vocab_size} tokens, but config.json's "
            f"vocab_size is {checkpoint.vocab_size}"
        )
