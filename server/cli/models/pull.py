"""``quire pull``: fetch a model from the hub, after a look at whether it can be served."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.models.checkpoint import Checkpoint
from kvcache.memory_budget import gib
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub import CONFIG_FILES, FoundModel, find_model, free_bytes
from server.catalogue.hub_cache import cache_folder
from server.catalogue.local_models import hub_model
from server.cli.model_files import (
    ModelError,
    check_found,
    checkpoint_of,
    make_plan,
    model_errors,
)
from server.cli.models.facts import described
from server.cli.settings import read_settings
from server.config import Config, SettingError


def pull_model(
    name: str,
    file: Path | None,
    echo: Callable[[str], None],
    *,
    dry_run: bool,
    force: bool,
) -> None:
    """Fetch a model. echo: writes a line. dry_run: whether to end before the first byte of weights.
    force: whether to fetch a model that is too large for this machine. Raises StartError."""
    settings = read_settings(file, {})
    with model_errors(), FolderReader() as reader:
        found = find_model(name, settings.models.folders, files=CONFIG_FILES)
        if found.repository is None:
            raise ModelError(f"{name}: this is {found.folder}, on this disk: nothing is to be done")
        check_found(reader, found, settings, tokenizer=False)
        checkpoint = checkpoint_of(found, settings)
        _describe(found, checkpoint, reader, echo)
        _check_memory(settings, checkpoint, echo, force=force)
        found.check_room()
        if dry_run:
            return
        found.fetch_small_files()
        check_found(reader, found, settings)
        if found.missing:
            found.fetch_weights()
            check_found(reader, replace(found, missing=()), settings)
        found.follow_branch()
    echo(f"It is here: `quire serve {name}` serves it.")


def _describe(
    found: FoundModel, checkpoint: Checkpoint, reader: FolderReader, echo: Callable[[str], None]
) -> None:
    assert found.repository is not None
    model = hub_model(found.repository, reader, found.folder)
    assert model is not None
    if found.notice:
        echo(found.notice)
    echo(f"{found.name}, commit {found.folder.name[:12]}: {described(model)}")
    if found.missing:
        echo(
            f"weights: {gib(found.missing_bytes)} of {gib(found.weights_bytes)} are to be fetched; "
            f"{gib(free_bytes(found.folder))} are free in {cache_folder()}"
        )
    else:
        echo(f"weights: {gib(checkpoint.stored_bytes)}, all of them here")


def _check_memory(
    settings: Config, checkpoint: Checkpoint, echo: Callable[[str], None], *, force: bool
) -> None:
    """Write whether the model fits into this machine's memory. Raises SettingError where it does
    not, unless forced."""
    try:
        memory = make_plan(settings, checkpoint).memory
    except SettingError as error:
        if not force:
            raise SettingError(f"{error}; --force fetches it all the same") from error
        echo(f"this machine cannot serve it: {error}")
        return
    echo(
        f"this machine: serves it with {memory.max_model_len} tokens of context; a token of K and "
        f"V takes {gib(memory.layout.bytes_per_token)}"
    )
