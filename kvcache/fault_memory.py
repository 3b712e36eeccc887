"""What a substrate of the GPU has done to this machine, remembered in the user's cache folder.

Before an act that may take the process, or the whole machine, down, an *intent* is written, and it
is removed after the act. One that is found later, and that no living process holds, means that the
act never came back. A *fault* is written when one was met and survived. Either keeps the substrate
from being chosen until ``quire doctor`` has passed.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from tempfile import mkstemp

from kvcache.canary.machine import this_machine
from kvcache.substrates import Substrate
from kvcache.user_folders import cache_folder

log = logging.getLogger(__name__)

# Of what is quoted from a file, or from a driver.
MOST_WORDS = 300
# What it takes on a Mac for a file to outlive a panic: fsync alone leaves it to the drive.
FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)


class Act(StrEnum):
    """What may take a machine down."""

    MAP = "the first mapping"
    UNMAP = "the first unmapping"
    RELEASE = "the release of a heap"
    RELEASE_TEST = "the release test"
    STRESS = "the stress test"


class FaultMemory:
    """The faults of one substrate with this model of machine, its system and its MLX as they are
    now. What cannot be written is a warning: serving does not depend on it."""

    def __init__(self, substrate: Substrate) -> None:
        self._substrate = substrate
        self._about = {"substrate": str(substrate), **this_machine().as_json()}
        key = sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        self._fault = f"fault-{key}.json"
        self._intents = f"intent-{key}-"

    def found(self) -> tuple[str, ...]:
        """What speaks against the substrate, half a sentence each."""
        said = []
        for path in self._files():
            if path.name == self._fault:
                said.append(f"{_words(path)} ({_shown(path)})")
            elif _is_left_behind(path):
                said.append(f"quire or the machine ended within {_words(path)} ({_shown(path)})")
        return tuple(said)

    @contextmanager
    def intent(self, act: Act) -> Iterator[None]:
        """Around the act, which is over when this returns. A failure that is survived is a
        fault."""
        written = self._write_intent(act)
        try:
            yield
        except Exception as error:
            self.record(f"{act} failed: {error}")
            raise
        finally:
            if written is not None:
                path, file = written
                path.unlink(missing_ok=True)
                os.close(file)  # and with it the lock: whoever gets that finds the file gone

    def record(self, what: str) -> None:
        """Remembers a fault that was survived; the newest one is kept. what: half a sentence."""
        try:
            _, file = self._write(what, self._fault)
            os.close(file)
        except OSError as error:
            log.warning("a fault of %s cannot be remembered: %s", self._substrate, error)

    def forget(self) -> bool:
        """Forgets everything but what a living process is about. Returns whether there was
        anything. Raises OSError where it cannot."""
        known = [p for p in self._files() if p.name == self._fault or _is_left_behind(p)]
        for path in known:
            path.unlink(missing_ok=True)
        return bool(known)

    # --- files ----------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        """The fault, then intents. One is enough to be heeded, whatever is in it."""
        folder = cache_folder()
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            return []
        return [
            folder / name for name in names if name == self._fault or name.startswith(self._intents)
        ]

    def _write_intent(self, act: Act) -> tuple[Path, int] | None:
        try:
            return self._write(act, None)
        except OSError as error:
            log.warning("%s of %s is not guarded by a file: %s", act, self._substrate, error)
            return None

    def _write(self, what: str, name: str | None) -> tuple[Path, int]:
        """Writes it so that it outlives the machine; returns the file, open and locked. name: None
        for an intent's, which is its own. Raises OSError."""
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        file, made = mkstemp(dir=folder, prefix=".new-")
        path = folder / (name or self._intents + Path(made).name.removeprefix(".new-"))
        at = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            # Under its name nobody finds it without its lock.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(file, (json.dumps({"what": what, "at": at, **self._about}) + "\n").encode())
            _sync(file)
            os.replace(made, path)
        except OSError:
            os.close(file)
            Path(made).unlink(missing_ok=True)
            raise
        _sync_folder(folder)
        return path, file


def _is_left_behind(path: Path) -> bool:
    """Whether whoever wrote an intent has died within its act: the system takes a lock from the
    dead, and from nobody else."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.fstat(file.fileno()).st_nlink > 0  # none where the act has just ended
    except (FileNotFoundError, BlockingIOError):
        return False
    except OSError:
        return True


def _words(path: Path) -> str:
    """What the file says, and of when; that it cannot be read, where it cannot."""
    try:
        said = json.loads(path.read_text())
        return f"{said['what'][:MOST_WORDS]}, {said['at'][:MOST_WORDS]}"
    except (OSError, ValueError, TypeError, KeyError):
        return "something that its file does not tell"


def _shown(path: Path) -> str:
    """Without the user's name: reports are given to others."""
    return str(path).replace(str(Path.home()), "~")


def _sync(file: int) -> None:
    os.fsync(file)
    if FULL_SYNC is not None:
        fcntl.fcntl(file, FULL_SYNC)


def _sync_folder(folder: Path) -> None:
    """Not every file system can."""
    file = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(file)
    os.close(file)
