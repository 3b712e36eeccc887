"""Read models' folders in a process of its own, each once.

Anybody may have written the files: they may be endless, or made to take for ever. What came of a
folder is remembered until one of its files is another one; that it took too long as well.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from engine.models.safetensors_headers import CheckpointError
from server.catalogue.hub_cache import BLOBS, cache_folder
from server.text.limited_process import LimitedProcess, LimitError, Limits

# What one folder may take. Honest ones take a second, on a machine that does much else ten.
LIMITS = Limits(20.0, 2 << 30)
MAX_FILES = 10_000
# Of a repository of the hub's, a commit's folders lie three levels below.
MAX_DEPTH = 3

State = frozenset[tuple[str, int, int, int]]
"""Of each file of a folder: its path, inode, bytes, and when it was written; nanoseconds."""


class FolderReader:
    """Calls functions that read a model's folder. Only one thread calls at a time."""

    def __init__(self, embeds: bool | None = None, process: LimitedProcess | None = None) -> None:
        """embeds: as for ``read_checkpoint``. process: one of ``reading_process`` that has been
        started."""
        self.embeds = embeds
        self.process = process or reading_process()
        self._known: dict[tuple[object, ...], tuple[State, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process. What is known of folders stays."""
        self.process.__exit__()

    def read(self, work: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
        """Return what a function says of a folder; it takes the folder's path and these arguments.
        Raises CheckpointError for a folder that is not to be read, or not within the limits."""
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
    # No reading asks the hub, and none runs threads for which there are no limits.
    variables = {
        "HF_HUB_CACHE": str(cache_folder()),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return LimitedProcess(variables, ("server.catalogue.model_checks",))


def folder_state(folder: Path) -> State:
    """Return what tells whether a folder has other files than before; none of them is opened. Of a
    repository of the hub's the links to its contents are looked at. Raises CheckpointError for
    what is no file, such as a device, and for too many of them."""
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
