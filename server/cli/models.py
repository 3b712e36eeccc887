"""``quire models``, ``show``, ``pull`` and ``rm``: the models on this disk and on the hub."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from huggingface_hub import CachedRevisionInfo, HFCacheInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from engine.build import EnginePlan
from engine.models.checkpoint import Checkpoint, CheckpointError
from kvcache.backends.choice import KVBackendChoice
from kvcache.budget import gib
from server.catalogue.companions import Heads, companion_names, is_companion, lacks_head
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub import CONFIG_FILES, FoundModel, check_room, find_model, free_bytes
from server.catalogue.hub_cache import (
    cache_folder,
    folders_in,
    part_bytes,
    repository_folder,
    snapshot_of,
)
from server.catalogue.lm_studio import is_below, lm_studio_folders
from server.catalogue.local_models import LocalModel, Place, local_models, model_here
from server.catalogue.lookup import look_up
from server.catalogue.names import ModelNotFoundError, printable
from server.cli.model_files import (
    ModelError,
    check_found,
    checkpoint_of,
    make_plan,
    model_errors,
    new_reader,
)
from server.cli.sentences import table
from server.cli.settings import read_settings
from server.config import Config, SettingError, engine_config


@dataclass(frozen=True, slots=True)
class Fit:
    """How this machine would serve a model, or the reason why it cannot serve the model."""

    context: int | None
    """The longest sequence in tokens; None if the model cannot be served."""
    kv_bytes_per_token: int | None
    reason: str | None
    """The reason why the model cannot be served; None if it can be served."""


class Machine:
    """This machine's memory and settings, for which models are planned."""

    def __init__(self, settings: Config, budget_bytes: int | None = None) -> None:
        """budget_bytes: memory for one model; None means the machine's free memory."""
        self.settings = settings
        self.budget_bytes = budget_bytes
        # The kind of memory for K and V. Only the first plan chooses it: testing a GPU is slow.
        self._choice: KVBackendChoice | None = None

    def plan(self, checkpoint: Checkpoint) -> EnginePlan:
        """Raises SettingError, which names the size that does not fit into memory."""
        plan = make_plan(self.settings, checkpoint, self.budget_bytes, self._choice)
        self._choice = plan.kv_backend
        return plan

    def fit(self, model: LocalModel) -> Fit:
        if model.checkpoint is None:
            return Fit(None, None, model.problem)
        try:
            memory = self.plan(model.checkpoint).memory
        except SettingError as error:
            return Fit(None, None, str(error))
        return Fit(memory.max_model_len, memory.layout.shape.lasting_bytes_per_token, None)


HEAD = ("name", "family", "size", "packed", "context", "lies in", "served here")
NOTHING = (
    "There are no models on this disk: `quire pull qwen3:0.6b` fetches a small one, and `quire "
    "serve demo` serves the bundled demo model."
)


def list_models(
    file: Path | None, say: Callable[[str], None], *, as_json: bool, show_all: bool
) -> str:
    """Return a table of the local models. say: called with warnings. show_all: whether to list
    repositories without a byte of weights on this disk. Raises StartError."""
    settings = read_settings(file, {})
    for folder in settings.models.folders:
        if not folder.expanduser().is_dir():
            say(f"models.folders: {folder}: there is no such folder")
    machine = Machine(settings)
    with new_reader(settings) as reader:
        models = local_models(settings.models.folders, reader=reader)
    # Also list unreadable repositories: they have no revision, and their size is unknown.
    listed = [m for m in models if show_all or m.size_bytes or not m.revision]
    fits = [(model, machine.fit(model)) for model in listed]
    studios = lm_studio_folders()
    if as_json:
        values = [as_values(model, fit, studios) for model, fit in fits]
        return json.dumps({"models": values}, indent=1)
    lines = _lines_of_table(fits, studios) if fits else [NOTHING]
    if hidden := len(models) - len(listed):
        lines.append(f"Without weights on this disk: {hidden} more, `quire models --all`")
    return "\n".join(lines)


def as_values(model: LocalModel, fit: Fit, studios: Sequence[Path]) -> dict[str, Any]:
    """Return the facts of a model, and its Fit, as values for JSON. ``studios`` are LM Studio's
    folders."""
    values = asdict(replace(model, checkpoint=None)) | {"folder": str(model.folder)}
    for name in ("problem", "digest", "checkpoint"):  # fit.reason includes the problem
        del values[name]
    return values | {"lies_in": _place(model, studios), "served": fit.reason is None} | asdict(fit)


def _place(model: LocalModel, studios: Sequence[Path]) -> str:
    if model.revision is not None:
        return "hub's cache"
    return "LM Studio" if is_below(model.folder, studios) else "a folder"


def _lines_of_table(fits: Sequence[tuple[LocalModel, Fit]], studios: Sequence[Path]) -> list[str]:
    rows = [
        (
            printable(model.name),
            model.family or "-",
            gib(model.size_bytes),
            model.quantization or "-",
            str(fit.context or model.max_position_embeddings or "-"),
            _place(model, studios),
            "no: see below" if fit.reason else "embeddings" if model.embeds else "yes",
        )
        for model, fit in fits
    ]
    named: dict[str, list[str]] = {}
    for model, fit in fits:
        if fit.reason:
            named.setdefault(fit.reason, []).append(printable(model.name))
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in named.items()]
    return [*table(HEAD, rows), *([""] if reasons else []), *reasons]


BILLION, MILLION = 1e9, 1e6


def show_model(name: str, file: Path | None, *, as_json: bool) -> str:
    """Return a description of a model on this disk. Raises StartError."""
    settings = read_settings(file, {})
    with model_errors(), new_reader(settings) as reader:
        place = look_up(name, settings.models.folders, reader, on_disk=True)
        model = model_here(place, reader)
    if model is None:
        raise ModelError(
            f"{name}: it is not on this disk: `quire pull {name}` fetches it, and `quire plan "
            f"{name}` says what it would need"
        )
    fit = Machine(settings).fit(model)
    paths = sorted(path for path in model.folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(model.folder)): path.stat().st_size for path in paths}
    commits = folders_in(model.folder.parent) if model.revision else ()
    others = [path.name for path in commits if path != model.folder]
    if as_json:
        values = as_values(model, fit, lm_studio_folders())
        return json.dumps(values | {"files": files, "other_revisions": others}, indent=1)
    return "\n".join(_lines(model, fit, files, others))


def described(model: LocalModel) -> str:
    unit, name = (BILLION, "billion") if model.parameters >= BILLION else (MILLION, "million")
    kind = "makes vectors" if model.embeds else "generates text"
    numbers = f"{model.parameters / unit:.2f} {name} parameters" if model.parameters else ""
    parts = (model.family, numbers, model.quantization, kind if model.parameters else "")
    return ", ".join(part for part in parts if part)


def _lines(model: LocalModel, fit: Fit, files: dict[str, int], others: list[str]) -> list[str]:
    when = datetime.fromtimestamp(model.modified).astimezone()
    served = fit.reason
    if served is None:
        served = (
            f"yes, {fit.context} tokens of context; a token of K and V takes "
            f"{gib(fit.kv_bytes_per_token or 0)}"
        )
    rows = {
        "model": described(model),
        "context": f"{model.max_position_embeddings} tokens"
        if model.max_position_embeddings
        else "-",
        "weights": f"{gib(model.size_bytes)}, of {when:%Y-%m-%d %H:%M}",
        "folder": str(model.folder),
        "lies in": _place(model, lm_studio_folders()),
        "commit": model.revision or "- (the folder is not the hub's)",
        "others": ", ".join(others),
        "served here": served,
    }
    width = max(map(len, rows))
    lines = [f"  {key.ljust(width)}  {printable(value)}" for key, value in rows.items() if value]
    sizes = [f"  {printable(name)}  {gib(size)}" for name, size in files.items()]
    return [printable(model.name), *lines, "files", *sizes]


def pull_model(
    name: str, file: Path | None, echo: Callable[[str], None], *, dry_run: bool, force: bool
) -> None:
    """Fetch a model. echo: writes a line. dry_run: whether to stop before the weights are fetched.
    force: whether to fetch a model that is too large for this machine. Raises StartError."""
    settings = read_settings(file, {})
    with model_errors(), new_reader(settings) as reader:
        wanted = find_model(name, settings.models.folders, files=CONFIG_FILES, reader=reader)
        if not wanted.on_hub:
            raise ModelError(
                f"{name}: this is {wanted.folder}, on this disk: nothing is to be done"
            )
        if reader.read(is_companion, wanted.folder):
            _pull_companion(wanted, echo, dry_run=dry_run)
            return
        heads = Heads(engine_config(settings).drafts, on_hub=wanted.misses_head)
        check_found(reader, wanted, settings, heads, tokenizer=False)
        checkpoint = checkpoint_of(wanted, settings, heads)
        _describe(wanted, checkpoint, reader, echo)
        _check_memory(settings, checkpoint, echo, force=force)
        check_room(wanted.asked, wanted.missing_bytes)
        if dry_run:
            return
        wanted.fetch_small_files()
        check_found(reader, wanted, settings, heads)
        if wanted.missing:
            wanted.fetch_weights()
            check_found(reader, replace(wanted, missing=()), settings, heads)
        wanted.follow_branch()
        _pull_companion_of(replace(wanted, missing=()), settings, reader, echo)
    echo(f"It is here: `quire serve {name}` serves it.")


def _pull_companion_of(
    wanted: FoundModel, settings: Config, reader: FolderReader, echo: Callable[[str], None]
) -> None:
    """Fetch the companion of a model without a head, if drafts are on and the hub has one."""
    is_wanted = engine_config(settings).drafts and not settings.engine.draft_model
    if not (is_wanted and lacks_head(checkpoint_of(wanted, settings))):
        return
    for name in companion_names(wanted.name):
        with suppress(ModelNotFoundError, CheckpointError):
            head = find_model(name, settings.models.folders, files=CONFIG_FILES, reader=reader)
            if reader.read(is_companion, head.folder):
                break
    else:
        echo("the hub has no head that drafts for it")
        return
    _pull_companion(head, echo)


def _pull_companion(
    head: FoundModel, echo: Callable[[str], None], *, dry_run: bool = False
) -> None:
    to_fetch = f"{gib(head.missing_bytes)} are to be fetched" if head.missing else "it is here"
    echo(f"{head.name}, the head that drafts for a model like this: {to_fetch}")
    check_room(head.asked, head.missing_bytes)
    if head.on_hub and not dry_run:
        head.fetch_small_files()
        head.fetch_weights()


def _describe(
    wanted: FoundModel, checkpoint: Checkpoint, reader: FolderReader, echo: Callable[[str], None]
) -> None:
    model = model_here(Place(wanted.name, revision=wanted.folder.name), reader)
    assert model is not None
    if wanted.notice:
        echo(wanted.notice)
    echo(f"{wanted.name}, commit {wanted.folder.name[:12]}: {described(model)}")
    if wanted.missing:
        echo(
            f"weights: {gib(wanted.missing_bytes)} of {gib(wanted.weights_bytes)} are to be "
            f"fetched; {gib(free_bytes(wanted.folder))} are free in {cache_folder()}"
        )
    else:
        echo(f"weights: {gib(checkpoint.stored_bytes)}, all of them here")


def _check_memory(
    settings: Config, checkpoint: Checkpoint, echo: Callable[[str], None], *, force: bool
) -> None:
    """Print whether a model fits into memory. If not, raise SettingError unless force is set."""
    try:
        memory = make_plan(settings, checkpoint).memory
    except SettingError as error:
        if not force:
            raise SettingError(f"{error}; --force fetches it all the same") from error
        echo(f"this machine cannot serve it: {error}")
        return
    echo(
        f"this machine: serves it with {memory.max_model_len} tokens of context; a token of K and "
        f"V takes {gib(memory.layout.shape.lasting_bytes_per_token)}"
    )


def remove_model(
    name: str, file: Path | None, echo: Callable[[str], None], confirm: Callable[[], object]
) -> None:
    """Remove a model's commits from the hub's local cache. echo: writes a line. confirm: called
    before anything is removed, and raises an error if the user does not agree. Raises StartError.
    """
    settings = read_settings(file, {})
    with model_errors():
        place = look_up(name, settings.models.folders, on_disk=True)
    folder = repository_folder(place.name).resolve()
    is_path = Path(name).expanduser().is_dir()
    if place.folder is not None and (is_path or not folder.exists()):
        in_lm_studio = is_below(place.folder, lm_studio_folders())
        raise ModelError(
            f"{name}: it lies in {place.folder}, and quire removes nothing outside of the hub's "
            f"cache: remove {'it in LM Studio' if in_lm_studio else 'that folder yourself'}"
        )
    pinned = snapshot_of(place.name, place.revision) if place.revision else None
    if place.revision and pinned is None:
        raise ModelError(f"{name}: this commit is not in the hub's cache, {cache_folder()}")
    try:
        cache = scan_cache_dir(cache_folder())
    except (CacheNotFound, OSError, ValueError) as error:
        raise ModelError(f"{name}: the hub's cache cannot be read: {error}") from error
    all_commits = _commits(name, place.name, cache)
    chosen = [one for one in all_commits if pinned is None or one.commit_hash == pinned.name]
    strategy = cache.delete_revisions(*(commit.commit_hash for commit in chosen))
    freed_bytes, kept = strategy.expected_freed_size, len(all_commits) - len(chosen)
    if kept:
        folder = chosen[0].snapshot_path
    else:
        freed_bytes += part_bytes(place.name)
    commits = ", ".join(commit.commit_hash[:12] for commit in chosen)
    others = f" Its other commits stay, {kept}." if kept else ""
    echo(f"{place.name}, commit {commits}: {gib(freed_bytes)} come back.{others}")
    echo(
        f"It lies in {cache_folder()}, which other programs use as well, such as mlx-lm, "
        "transformers, vLLM and LM Studio: they would fetch it again."
    )
    confirm()
    assert folder.is_relative_to(cache_folder().resolve())
    try:
        strategy.execute()
    except OSError as error:
        raise ModelError(f"{folder}: it cannot be removed: {error}") from error
    if folder.exists():
        raise ModelError(f"{folder}: not all of it could be removed: whose files are these?")
    echo(f"Removed {place.name}: {gib(freed_bytes)} are free again.")


def _commits(name: str, repository: str, cache: HFCacheInfo) -> list[CachedRevisionInfo]:
    """Return the repository's cached commits, oldest first. Raises ModelError if there are none."""
    for repo in cache.repos:
        if (repo.repo_type, repo.repo_id) == ("model", repository) and repo.revisions:
            return sorted(repo.revisions, key=lambda commit: commit.last_modified)
    folder = repository_folder(repository)
    if folder.exists():
        raise ModelError(f"{name}: the hub's tools find it broken: remove {folder} yourself")
    raise ModelError(f"{name}: it is not in the hub's cache, {cache_folder()}")
