"""List the models on this disk: in the Hugging Face hub's cache, and in configured folders.

No weights are read: config.json, the index and the headers of safetensors files say all of it. They
are read in a process of its own: here nothing is opened.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from engine.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    promised_checkpoint,
    read_checkpoint,
)
from engine.models.config import AFFINE, ModelConfig
from engine.models.safetensors_headers import MAX_JSON_BYTES
from engine.planning.memory import ModelShape, read_shape
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub_cache import (
    best_snapshot,
    cached_repositories,
    folders_in,
    lacks_weights,
    missing_weights,
    repository_folder,
)
from server.catalogue.names import (
    DEMO_ID,
    GGUF,
    MAX_PROBLEM_CHARS,
    MAX_WORD_CHARS,
    ModelNotFoundError,
    has_gguf_alone,
    printable,
)
from server.shipped import DEMO_MODEL, shipped

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
# What a file of weights ends with, whoever reads it.
WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf", ".bin", ".npz", ".pt", ".pth"})
DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
CONFIG_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this disk, and why it cannot be served, where it cannot."""

    name: str
    """Its id on the hub; of a configured folder ``org/name`` where it lies two levels below, else
    the folder's own name."""
    folder: Path
    size_bytes: int
    """Of its files of weights, as far as they are here."""
    modified: float
    """When the newest of these files was written; Unix seconds."""
    revision: str | None
    """The hub's commit; None for a configured folder."""
    family: str
    """config.json's model_type; empty where it has none."""
    parameters: int
    """Numbers of all weights; 0 where the family is not served."""
    quantization: str
    """How matrices are packed: "4-bit", "mxfp4", "bf16"; empty where nothing says it."""
    max_position_embeddings: int
    """Tokens that the model knows positions for; 0 where the family is not served."""
    embeds: bool
    """Whether it makes vectors of texts, and generates nothing."""
    problem: str | None
    """Why it cannot be served, one sentence; None where it can."""
    digest: str = ""
    """64 hexadecimal digits that differ where its files do; empty where it cannot be served."""
    checkpoint: Checkpoint | None = None
    """None where it cannot be served."""


PLAIN = TypeAdapter(LocalModel)
"""A model as the process that reads it writes it."""


def local_models(
    folders: Sequence[Path], *, hub: bool = True, reader: FolderReader | None = None
) -> tuple[LocalModel, ...]:
    """Return the models of this disk, by name.

    folders: each is a model, or has models one level below, or two (``org/name``). One that is not
    there has none. hub: whether the hub's cache counts. reader: with what it knows of folders. A
    name stands for one model: for one that can be served, and of these for the one of the first
    folder; the hub's cache comes last.
    """
    if reader is None:
        with FolderReader() as reader:
            return local_models(folders, hub=hub, reader=reader)
    found: dict[str, LocalModel] = {}
    seen: set[Path] = set()
    for model in _all_models(folders, reader, hub=hub):
        folder = model.folder.resolve()
        before = found.get(model.name)
        if folder not in seen and (before is None or (before.problem and not model.problem)):
            found[model.name] = model
        seen.add(folder)
    return tuple(sorted(found.values(), key=lambda model: model.name.lower()))


def hub_model(
    repository: str, reader: FolderReader, snapshot: Path | None = None
) -> LocalModel | None:
    """Return what the hub's cache has of a repository; None where it has nothing. snapshot: the
    commit's folder; else the one that would be served without asking the hub."""
    if snapshot is not None:
        return _read(reader, read_model, snapshot, repository, snapshot.name)
    folder = repository_folder(repository)
    if not folders_in(folder / "snapshots"):
        return None
    return _read(reader, read_repository, folder, repository, "")


def folder_model(name: str, folder: Path, reader: FolderReader) -> LocalModel:
    """Return what a folder has that is not the hub's."""
    return _read(reader, read_model, folder, name, None)


def _read(
    reader: FolderReader, work: Any, folder: Path, name: str, revision: str | None
) -> LocalModel:
    """Return what a folder's files say, or that they cannot be read. revision: the hub's commit;
    empty where the files say which of several it is."""
    try:
        return PLAIN.validate_python(reader.read(work, folder, name, revision, reader.embeds))
    except CheckpointError as error:
        facts = _Facts()
        facts.refuse(name, folder, error)
        return _model_of(name, folder, revision, facts)


def _all_models(
    folders: Sequence[Path], reader: FolderReader, *, hub: bool
) -> Iterator[LocalModel]:
    for folder in folders:
        for name, path in _model_folders(folder.expanduser().absolute()):
            yield folder_model(name, path, reader)
    if hub:
        for repository in cached_repositories():
            if (model := hub_model(repository, reader)) is not None:
                yield model


def _model_folders(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the models of a configured folder, with their names."""
    if _is_model(folder):
        is_demo = folder.resolve() == shipped(DEMO_MODEL).resolve()
        yield DEMO_ID if is_demo else folder.resolve().name, folder
        return
    for below in folders_in(folder):
        if _is_model(below):
            yield below.name, below
            continue
        for model in folders_in(below):
            if _is_model(model):
                yield f"{below.name}/{model.name}", model


def _is_model(folder: Path) -> bool:
    """Return whether a folder has what a model consists of, complete or not."""
    return (folder / CONFIG_FILE).is_file() or bool(_weights_in(folder))


def _weights_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix.lower() in WEIGHT_SUFFIXES]
    except OSError:
        return []


def read_repository(folder: str, repository: str, _: str, embeds: bool | None) -> Any:
    """Return what the hub's cache has of a repository, as ``read_model`` does."""
    snapshot = best_snapshot(repository)
    assert snapshot is not None, folder
    return read_model(str(snapshot), repository, snapshot.name, embeds)


def read_model(path: str, name: str, revision: str | None, embeds: bool | None) -> Any:
    """Return what a folder's files say, as PLAIN has it. Whatever they hold, the other models are
    listed."""
    folder, facts = Path(path), _Facts()
    try:
        facts.read(name if revision else None, folder, embeds)
    except Exception as error:
        # Any program may have written these files: what no check foresees is a problem of theirs.
        facts.refuse(name, folder, error)
    return PLAIN.dump_python(_model_of(name, folder, revision, facts), mode="json")


def _model_of(name: str, folder: Path, revision: str | None, facts: "_Facts") -> LocalModel:
    try:
        stats = [path.stat() for path in _weights_in(folder) if path.exists()]
        size_bytes = sum(stat.st_size for stat in stats)
        modified = max((stat.st_mtime for stat in stats), default=folder.stat().st_mtime)
    except OSError:  # gone meanwhile, or not to be read
        size_bytes, modified = 0, 0.0
    return LocalModel(
        name,
        folder,
        size_bytes,
        modified,
        revision,
        printable(facts.family, MAX_WORD_CHARS),
        facts.shape.parameters if facts.shape else 0,
        printable(facts.quantization, MAX_WORD_CHARS),
        facts.shape.max_position_embeddings if facts.shape else 0,
        facts.embeds,
        None if facts.problem is None else printable(facts.problem, MAX_PROBLEM_CHARS),
        facts.digest,
        facts.checkpoint,
    )


class _Facts:
    """What a folder's files say, as far as they could be read."""

    def __init__(self) -> None:
        self.family = self.quantization = self.digest = ""
        self.shape: ModelShape | None = None
        self.embeds = False
        self.problem: str | None = None
        self.checkpoint: Checkpoint | None = None

    def refuse(self, name: str, folder: Path, error: Exception) -> None:
        """Say why the folder's files are not served."""
        if isinstance(error, CheckpointError | ModelNotFoundError):
            problem = str(error).replace(f"{folder}/", "").removeprefix(f"{folder}: ")
            self.problem = problem.removeprefix(f"{name}: ")
        else:
            self.problem = f"its files cannot be read: {type(error).__name__}: {error}"

    def read(self, repository: str | None, folder: Path, embeds: bool | None) -> None:
        """Read a folder, the sure things first. repository: whose commit it is. Raises
        CheckpointError, and whatever reading files raises."""
        if not (folder / CONFIG_FILE).exists():
            gguf = any(path.suffix.lower() == ".gguf" for path in _weights_in(folder))
            self.problem = GGUF if gguf else f"there is no {CONFIG_FILE}"
            self.quantization = "gguf" if gguf else ""
            return
        config = ModelConfig(folder)
        self.family = str(config.values.get("model_type") or "")
        self.quantization = named_quantization(config.text.values)
        self.shape = read_shape(folder)
        if has_gguf_alone(folder):
            self.problem = GGUF
            return
        missing = missing_weights(repository, folder)
        if missing or (repository and lacks_weights(repository, folder)):
            self.embeds = promised_checkpoint(folder, 0).embeds
            self.problem = _incomplete(repository, missing)
            return
        checkpoint = read_checkpoint(folder, embeds=embeds)
        self.embeds = checkpoint.embeds
        self.quantization = _stored_as(checkpoint, self.quantization)
        if not (folder / TOKENIZER_FILE).is_file():
            self.problem = f"{TOKENIZER_FILE}: the file does not exist"
            return
        self.digest, self.checkpoint = digest_of(model_files(folder)), checkpoint


def _incomplete(repository: str | None, missing: Sequence[str]) -> str:
    files = f"{len(missing)} file{'s' * (len(missing) != 1)} of weights" if missing else "weights"
    verb = "is" if len(missing) == 1 else "are"
    if repository is None:
        return f"{files} {verb} missing, such as {missing[0]}"
    return f"{files} {verb} not here yet: `quire pull {repository}` fetches what is missing"


def named_quantization(values: dict[str, Any]) -> str:
    """Return in a word how ``config.json`` says that matrices are packed; empty where it says
    nothing."""
    packing = values.get("quantization")
    if isinstance(packing, dict):
        mode = packing.get("mode", AFFINE)
        return f"{packing.get('bits')}-bit" if mode == AFFINE else str(mode)
    foreign = values.get("quantization_config")
    if isinstance(foreign, dict) and foreign.get("quant_method"):
        return str(foreign["quant_method"])
    return CONFIG_DTYPES.get(str(values.get("dtype") or values.get("torch_dtype")), "")


def _stored_as(checkpoint: Checkpoint, named: str) -> str:
    """Return how matrices are stored: of plain ones the files know better than config.json."""
    plain = named in CONFIG_DTYPES.values() or not named
    return DTYPES[checkpoint.dtype] if plain else named


def model_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))


def digest_of(files: Iterable[Path]) -> str:
    """Hash what tells one model from another in an instant: small files whole, and of weights
    their names and sizes."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode(errors="surrogateescape"))
        if file.suffix == ".json" and size <= MAX_JSON_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()
