"""List the models on this disk: in the Hugging Face hub's cache, and in configured folders.

No weights are read: config.json, the index and the headers of safetensors files say all of it. A
process of its own reads them, and checks them as they would be served: here no file is opened.
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
from engine.planning.memory import read_shape
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
from server.text.tokenizer import Tokenizer, TokenizerError

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
# Files of weights of all programs.
WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf", ".bin", ".npz", ".pt", ".pth"})
MAX_CHARS = {
    "family": MAX_WORD_CHARS,
    "quantization": MAX_WORD_CHARS,
    "problem": MAX_PROBLEM_CHARS,
}
DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
CONFIG_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this disk. It can be served unless it has a problem."""

    name: str
    """The id on the hub; of a configured folder ``org/name`` where it lies two levels below, else
    the folder's own name."""
    folder: Path
    size_bytes: int
    """The bytes of all files of weights that are here."""
    modified: float
    """The time of the newest of these files; Unix seconds."""
    revision: str | None
    """The hub's commit; None for a configured folder."""
    family: str = ""
    """config.json's model_type; empty where it has none."""
    parameters: int = 0
    """The number of all weights; 0 where the family is not served."""
    quantization: str = ""
    """The packing of matrices: "4-bit", "mxfp4", "bf16"; empty where no file says it."""
    max_position_embeddings: int = 0
    """0 where the family is not served."""
    embeds: bool = False
    """Whether it makes vectors of texts, and generates nothing."""
    problem: str | None = None
    """The reason for which it cannot be served, one sentence."""
    digest: str = ""
    """64 hexadecimal digits that differ where its files do; empty where it cannot be served."""
    checkpoint: Checkpoint | None = None
    """None where it cannot be served."""


AS_JSON = TypeAdapter(LocalModel)
"""The form in which a reading process returns a model."""
Facts = dict[str, Any]
"""Fields of a LocalModel."""


def local_models(
    folders: Sequence[Path], *, hub: bool = True, reader: FolderReader | None = None
) -> tuple[LocalModel, ...]:
    """Return the models of this disk, by name.

    folders: each is a model, or has models one level below, or two (``org/name``); it may be
    missing. hub: whether the hub's cache counts. reader: remembers folders. Of models with the same
    name the first that can be served counts, in the order of the folders; the hub's cache comes
    last.
    """
    if reader is None:
        with FolderReader() as reader:
            return local_models(folders, hub=hub, reader=reader)
    by_name: dict[str, LocalModel] = {}
    seen: set[Path] = set()
    for model in _all_models(folders, reader, hub=hub):
        folder = model.folder.resolve()
        before = by_name.get(model.name)
        if folder not in seen and (before is None or (before.problem and not model.problem)):
            by_name[model.name] = model
        seen.add(folder)
    return tuple(sorted(by_name.values(), key=lambda model: model.name.lower()))


def hub_model(
    repository: str, reader: FolderReader, snapshot: Path | None = None
) -> LocalModel | None:
    """Return a repository's model in the hub's cache, if any. snapshot: the commit's folder; else
    the one that would be served without a network."""
    if snapshot is not None:
        return _read(reader, read_model, snapshot, repository, snapshot.name)
    folder = repository_folder(repository)
    if not folders_in(folder / "snapshots"):
        return None
    return _read(reader, read_repository, folder, repository, "")


def folder_model(name: str, folder: Path, reader: FolderReader) -> LocalModel:
    """Return the model in a folder outside of the hub's cache."""
    return _read(reader, read_model, folder, name, None)


def _read(
    reader: FolderReader, work: Any, folder: Path, name: str, revision: str | None
) -> LocalModel:
    """Return the model in a folder; where it cannot be read, with this problem. revision: the hub's
    commit; empty where the files determine it."""
    try:
        return AS_JSON.validate_python(reader.read(work, folder, name, revision, reader.embeds))
    except CheckpointError as error:
        return _model_of(name, folder, revision, {"problem": _problem(name, folder, error)})


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
    """Return whether a folder has files of a model, complete or not."""
    return (folder / CONFIG_FILE).is_file() or bool(_weights_in(folder))


def _weights_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix.lower() in WEIGHT_SUFFIXES]
    except OSError:
        return []


def read_repository(folder: str, repository: str, _: str, embeds: bool | None) -> Any:
    """Read a repository in the hub's cache, as ``read_model`` does."""
    snapshot = best_snapshot(repository)
    assert snapshot is not None, folder
    return read_model(str(snapshot), repository, snapshot.name, embeds)


def read_model(path: str, name: str, revision: str | None, embeds: bool | None) -> Any:
    """Read a folder's files; return AS_JSON's form. A file that cannot be read becomes a problem:
    the other models are listed all the same."""
    folder, facts = Path(path), Facts()
    try:
        for more in _read_facts(name if revision else None, folder, embeds):
            facts |= more
    except Exception as error:
        # Any program may have written these files, and no check foresees all of their mistakes.
        facts["problem"] = _problem(name, folder, error)
    return AS_JSON.dump_python(_model_of(name, folder, revision, facts), mode="json")


def _model_of(name: str, folder: Path, revision: str | None, facts: Facts) -> LocalModel:
    try:
        stats = [path.stat() for path in _weights_in(folder) if path.exists()]
        size_bytes = sum(stat.st_size for stat in stats)
        modified = max((stat.st_mtime for stat in stats), default=folder.stat().st_mtime)
    except OSError:  # gone meanwhile, or not readable
        size_bytes, modified = 0, 0.0
    for field, max_chars in MAX_CHARS.items():
        if field in facts:
            facts[field] = printable(facts[field], max_chars)
    return LocalModel(name, folder, size_bytes, modified, revision, **facts)


def _problem(name: str, folder: Path, error: Exception) -> str:
    """Return why the folder's files are not served."""
    if isinstance(error, CheckpointError | ModelNotFoundError):
        problem = str(error).replace(f"{folder}/", "").removeprefix(f"{folder}: ")
        return problem.removeprefix(f"{name}: ")
    return f"its files cannot be read: {type(error).__name__}: {error}"


def _read_facts(repository: str | None, folder: Path, embeds: bool | None) -> Iterator[Facts]:
    """Yield facts of a folder; files that are more likely to be good come first. repository: the
    one whose commit it is. Raises CheckpointError, and any error of reading files."""
    if not (folder / CONFIG_FILE).exists():
        if any(path.suffix.lower() == ".gguf" for path in _weights_in(folder)):
            yield {"problem": GGUF, "quantization": "gguf"}
        else:
            yield {"problem": f"there is no {CONFIG_FILE}"}
        return
    config = ModelConfig(folder)
    quantization = named_quantization(config.text.values)
    yield {"family": str(config.values.get("model_type") or ""), "quantization": quantization}
    shape = read_shape(folder)
    yield {
        "parameters": shape.parameters,
        "max_position_embeddings": shape.max_position_embeddings,
    }
    if has_gguf_alone(folder):
        yield {"problem": GGUF}
        return
    missing = missing_weights(repository, folder)
    if missing or (repository and lacks_weights(repository, folder)):
        yield {"embeds": promised_checkpoint(folder, 0).embeds}
        yield {"problem": _incomplete(repository, missing)}
        return
    checkpoint = read_checkpoint(folder, embeds=embeds)
    yield {"embeds": checkpoint.embeds, "quantization": _stored_as(checkpoint, quantization)}
    if (folder / TOKENIZER_FILE).is_file():
        yield {"digest": digest_of(model_files(folder)), "checkpoint": checkpoint}
    else:
        yield {"problem": f"{TOKENIZER_FILE}: the file does not exist"}


def _incomplete(repository: str | None, missing: Sequence[str]) -> str:
    files = f"{len(missing)} file{'s' * (len(missing) != 1)} of weights" if missing else "weights"
    verb = "is" if len(missing) == 1 else "are"
    if repository is None:
        return f"{files} {verb} missing, such as {missing[0]}"
    return f"{files} {verb} not here yet: `quire pull {repository}` fetches what is missing"


def named_quantization(values: dict[str, Any]) -> str:
    """Return the packing of matrices that ``config.json`` names; empty where it names none."""
    packing = values.get("quantization")
    if isinstance(packing, dict):
        mode = packing.get("mode", AFFINE)
        return f"{packing.get('bits')}-bit" if mode == AFFINE else str(mode)
    foreign = values.get("quantization_config")
    if isinstance(foreign, dict) and foreign.get("quant_method"):
        return str(foreign["quant_method"])
    return CONFIG_DTYPES.get(str(values.get("dtype") or values.get("torch_dtype")), "")


def _stored_as(checkpoint: Checkpoint, named: str) -> str:
    """Return how matrices are stored. The dtype of plain ones is the files', not config.json's."""
    plain = named in CONFIG_DTYPES.values() or not named
    return DTYPES[checkpoint.dtype] if plain else named


def model_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))


def digest_of(files: Iterable[Path]) -> str:
    """Hash a model's files in an instant: small files whole, and the names and sizes of weights."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode(errors="surrogateescape"))
        if file.suffix == ".json" and size <= MAX_JSON_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def folder_problem(
    path: str, embeds: bool | None, promised_bytes: int | None, tokenizer: bool
) -> str | None:
    """Return why a folder cannot be served, a sentence; None where it can. promised_bytes: of all
    weights, where some are not here yet. tokenizer: whether that is here."""
    folder = Path(path)
    try:
        checkpoint = checkpoint_in(folder, embeds, promised_bytes)
        if tokenizer:
            check_vocabulary(folder, Tokenizer(folder), checkpoint)
    except (CheckpointError, TokenizerError) as error:
        return str(error)
    return None


def shape_problem(path: str) -> str | None:
    """Return why the shape of the model in a folder cannot be read; None where it can."""
    try:
        read_shape(Path(path))
    except CheckpointError as error:
        return str(error)
    return None


def checkpoint_in(folder: Path, embeds: bool | None, promised_bytes: int | None) -> Checkpoint:
    """Read a folder's checkpoint, whole or promised. Raises CheckpointError."""
    if promised_bytes is None:
        return read_checkpoint(folder, embeds=embeds)
    return promised_checkpoint(folder, promised_bytes, embeds=embeds)


def template_facts(path: str) -> tuple[str, bool, bool, str]:
    """Return the problem of a folder's tokenizer, or an empty string; whether its chat template
    writes calls, and thoughts; and the template."""
    try:
        template = Tokenizer(Path(path)).template
    except TokenizerError as error:
        return str(error), False, False, ""
    return "", template.tool_format is not None, template.knows_thoughts, template.text


def check_vocabulary(folder: Path, tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Raise TokenizerError for a tokenizer with more tokens than the weights have."""
    if tokenizer.vocab_size > checkpoint.vocab_size:
        raise TokenizerError(
            f"{folder / TOKENIZER_FILE}: it has {tokenizer.vocab_size} tokens, but config.json's "
            f"vocab_size is {checkpoint.vocab_size}"
        )
