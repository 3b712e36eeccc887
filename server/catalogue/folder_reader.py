"""Reads models' folders in a process with limits of time and memory, since strangers' files may be
endless or slow to parse. Stores a result, or a timeout, until a file in the folder changes."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

from engine.models.safetensors_headers import CheckpointError
from kvcache.child import Child, LimitError, Limits
from server.catalogue.hub_cache import BLOBS, cache_folder
from server.text.tokenizer_files import TokenizerError

# Reading a folder takes a second, or ten on a busy machine.
LIMITS = Limits(20.0, 20.0, 2 << 30)
MAX_FILES = 10_000
# In the hub's cache the subfolders of commits lie three levels below the repository's folder.
MAX_DEPTH = 3

State = frozenset[tuple[str, int, int, int]]
"""(path, inode, size in bytes, modification time in nanoseconds) of each file in a folder."""


class FolderReader:
    """Calls functions that read a model's folder. Only one thread may use a reader at a time."""

    def __init__(
        self, embeds: bool | None = None, process: Child | None = None, drafts: bool = True
    ) -> None:
        """embeds, drafts: as for ``read_checkpoint``. process: a ``reading_process()``."""
        self.embeds = embeds
        self.drafts = drafts
        self.process = process or reading_process()
        self._known: dict[tuple[object, ...], tuple[State, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the reading process, but keep the stored results."""
        self.process.close()

    def read(self, work: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
        """Return ``work(folder, *arguments)``, either stored or computed by the reading process.
        Raises CheckpointError for files that ``folder_state`` or ``work`` refuses, and beyond
        LIMITS."""
        state = folder_state(folder)
        call = (work, folder, arguments)
        known = self._known.get(call)
        if known is None or known[0] != state:
            name = f"{work.__module__}:{work.__qualname__}"
            try:
                result, problem = self.process.call(LIMITS, attempt, str(folder), name, *arguments)
            except LimitError as error:
                result, problem = None, f"{folder}: its files cannot be read: {error}"
            known = self._known[call] = state, CheckpointError(problem) if problem else result
        if isinstance(known[1], CheckpointError):
            raise known[1].with_traceback(None)
        return known[1]


def attempt(folder: str, work: str, *arguments: Any) -> tuple[Any, str]:
    """Return the result of the function with the name ``work``, and why it refuses the files, or
    an empty text."""
    try:
        return resolve_name(work)(folder, *arguments), ""
    except (CheckpointError, TokenizerError) as error:
        return None, str(error)


def reading_process() -> Child:
    # The process must not contact the hub, nor start threads, which would escape the limits.
    variables = {
        "HF_HUB_CACHE": str(cache_folder()),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Child(variables, ("server.catalogue.local_models",))


def folder_state(folder: Path) -> State:
    """Return a value that changes whenever a folder's files do. Follow links, but open no file.
    Raises CheckpointError for a special file such as a device, or for too many files."""
    state: set[tuple[str, int, int, int]] = set()
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        read = [name for name in folders if name != BLOBS and not name.startswith(".")]
        folders[:] = read if depth < MAX_DEPTH else ()
        for name in files:
            path = os.path.join(place, name)
            try:
                status = os.stat(path)
            except OSError:  # the file was removed meanwhile, or is a broken link
                continue
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: this is no regular file")
            state.add((path, status.st_ino, status.st_size, status.st_mtime_ns))
        if len(state) > MAX_FILES:
            raise CheckpointError(f"{folder}: it has more than {MAX_FILES} files")
    return frozenset(state)
