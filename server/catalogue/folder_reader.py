"""Read models' folders in a process of its own, each once.

Anybody may have written the files: they may be endless, or made to take for ever. The result for a
folder, a timeout too, is remembered until one of its files changes.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from engine.models.safetensors_headers import CheckpointError
from server.catalogue.hub_cache import BLOBS, cache_folder
from server.text.limited_process import LimitedProcess, LimitError, Limits

# Limits for one folder. Honest ones take a second, or ten on a busy machine.
LIMITS = Limits(20.0, 2 << 30)
MAX_FILES = 10_000
# In a repository of the hub's cache, a commit's folders lie three levels below.
MAX_DEPTH = 3

State = frozenset[tuple[str, int, int, int]]
"""Path, inode, bytes and modification time (nanoseconds) of each file of a folder."""


class FolderReader:
    """Calls functions that read a model's folder. Only one thread calls at a time."""

    def __init__(self, embeds: bool | None = None, process: LimitedProcess | None = None) -> None:
        """embeds: as for ``read_checkpoint``. process: a started one of ``reading_process``."""
        self.embeds = embeds
        self.process = process or reading_process()
        self._known: dict[tuple[object, ...], tuple[State, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process. The results stay."""
        self.process.__exit__()

    def read(self, work: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
        """Call a function with a folder's path and these arguments; return its result. Raises
        CheckpointError for a folder that must not be read, or exceeds the limits."""
        state = folder_state(folder)
        call = (work, folder, arguments)
        known = self._known.get(call)
        if known is None or known[0] != state:
            known = self._known[call] = state, self._called(work, folder, arguments)
        if isinstance(known[1], CheckpointError):
            raise known[1].with_traceback(None)
        return known[1]

    def _called(
        self, work: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]
    ) -> Any | CheckpointError:
        try:
            return self.process.call(LIMITS, work, str(folder), *arguments)
        except LimitError as error:
            return CheckpointError(f"{folder}: its files cannot be read: {error}")


def reading_process() -> LimitedProcess:
    """Make the process for a FolderReader."""
    # A reading must not ask the hub, nor run threads, which have no limits.
    variables = {
        "HF_HUB_CACHE": str(cache_folder()),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return LimitedProcess(variables, ("server.catalogue.local_models",))


def folder_state(folder: Path) -> State:
    """Return a value that changes with a folder's files; none of them is opened. Links of the hub's
    cache are followed. Raises CheckpointError for a device and the like, and for too many files."""
    state: set[tuple[str, int, int, int]] = set()
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        read = [name for name in folders if name != BLOBS and not name.startswith(".")]
        folders[:] = read if depth < MAX_DEPTH else ()
        for name in files:
            path = os.path.join(place, name)
            try:
                status = os.stat(path)
            except OSError:  # gone meanwhile, or a link that leads nowhere
                continue
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: this is no regular file")
            state.add((path, status.st_ino, status.st_size, status.st_mtime_ns))
        if len(state) > MAX_FILES:
            raise CheckpointError(f"{folder}: it has more than {MAX_FILES} files")
    return frozenset(state)
