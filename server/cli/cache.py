"""``quire cache``: the prefixes that servers keep on disk. It works while servers run."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

from engine.config import EngineConfig
from kvcache.budget import gib
from kvcache.tier.store import (
    ModelSummary,
    ReadResult,
    RecordStore,
    TierLimits,
    usual_held_bytes,
)
from kvcache.user_folders import prefixes_folder
from server.catalogue.hub_cache import REPOSITORY
from server.catalogue.names import printable
from server.cli.salt_secret import read_salts
from server.cli.sentences import table
from server.cli.settings import read_settings
from server.config import Config, SettingError, engine_config

HEAD = ("name", "records", "size", "last used")
TAG_DIGITS = 8
READABLE = (
    "Whoever can read these files and has the model can turn them back into text: `quire cache "
    "clear` removes them, cache.disk = 0 keeps none."
)


def _settings(file: Path | None, folder: str | None) -> Config:
    return read_settings(file, {"cache": {"disk_folder": folder}})


@contextmanager
def _records(config: EngineConfig) -> Iterator[RecordStore | None]:
    """Open what lies on disk, or None if nothing does. Raises SettingError."""
    try:
        folder = prefixes_folder(config.disk_folder)
        if not folder.exists():
            yield None
            return
        held = usual_held_bytes(folder) if config.disk_bytes is None else config.disk_bytes
        limits = TierLimits(held, per_hour=config.disk_hourly_bytes)
        with closing(RecordStore(folder, limits)) as store:
            yield store
    except (OSError, RuntimeError) as error:
        raise SettingError(f"setting cache.disk_folder: {error}") from error


def _name(model: ModelSummary) -> str:
    """Return a model's name for people. A snapshot of the hub has that of its repository."""
    parts = Path(model.name).parts
    hubs = [part for part in parts if part.startswith(REPOSITORY)]
    if hubs:
        return printable(hubs[-1].removeprefix(REPOSITORY).replace("--", "/"))
    return printable(parts[-1]) if parts else model.tag.hex()[:TAG_DIGITS]


def show_cache(file: Path | None, folder: str | None) -> str:
    """Return what lies on disk, as text. Raises SettingError."""
    config = engine_config(_settings(file, folder))
    with _records(config) as store:
        if store is None:
            return f"{prefixes_folder(config.disk_folder)}: nothing is kept here"
        summary, limits = store.summary(), store.limits
    rows = [
        (
            _name(model),
            str(model.records),
            gib(model.nbytes),
            f"{datetime.fromtimestamp(model.last_use_s).astimezone():%Y-%m-%d %H:%M}",
        )
        for model in summary.models
    ]
    return "\n".join(
        [
            *(table(HEAD, rows) if rows else ()),
            f"{gib(summary.held_bytes)} of {gib(summary.limit_bytes)} at most, "
            f"{gib(summary.hour_bytes)} of {gib(limits.per_hour)} written in an hour, "
            f"{gib(summary.day_bytes)} of {gib(limits.per_day)} in a day",
            str(prefixes_folder(config.disk_folder)),
            READABLE,
        ]
    )


def clear_cache(file: Path | None, folder: str | None, model: str | None, key: str | None) -> str:
    """Remove all records, or those of a model, of an API key, or of both. Raises SettingError."""
    settings = _settings(file, folder)
    config = engine_config(settings)
    tenant = None
    if key is not None:
        from kvcache.tier.tier import tenant_tag  # it imports MLX

        tenant = tenant_tag(read_salts(settings.access.salt_secret_file).salt(key, None).tenant)
    with _records(config) as store:
        place = prefixes_folder(config.disk_folder)
        if store is None:
            return f"{place}: there was nothing to remove"
        tags: list[bytes | None] = [None]
        if model is not None:
            models = {each.tag: _name(each) for each in store.summary().models}
            tags = [tag for tag, name in models.items() if name == model]
            if not tags:
                names = ", ".join(sorted({*models.values()})) or "no model"
                raise SettingError(f"{model}: nothing of it is on disk, which has {names}")
        removed = [store.clear(tag, tenant) for tag in tags]
    records, nbytes = map(sum, zip(*removed, strict=True))
    return f"{place}: removed {records} records, {gib(nbytes)}"


def verify_cache(file: Path | None, folder: str | None, say: Callable[[str], None]) -> bool:
    """Read all records, and remove broken and lost ones. Return True if all are whole."""
    from kvcache.tier.tier import file_checksum  # it imports MLX

    with _records(engine_config(_settings(file, folder))) as store:
        results = {} if store is None else store.verify(file_checksum)
    counts = {one: len(results.get(one, ())) for one in ReadResult}
    removed = counts[ReadResult.BROKEN] + counts[ReadResult.GONE]
    say(
        f"{counts[ReadResult.OK]} records are whole, {removed} were broken or lost and are "
        f"removed, {counts[ReadResult.FAILED]} are unreadable"
    )
    return not removed + counts[ReadResult.FAILED]
