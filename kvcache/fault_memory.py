"""Remembers in the user's cache folder which GPU backends (kinds of memory) harmed this machine.

An *intent* file is written before an act that may crash the process or the machine, and removed
after the act. If no living process locks an intent, its act never returned. A *fault* file is
written after harm that the process survived. A backend with either is avoided until ``quire
doctor`` has passed."""

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

from kvcache.kv_backends import KVBackend
from kvcache.selftest.machine import this_machine
from kvcache.user_folders import cache_folder

log = logging.getLogger(__name__)

# The limit of characters quoted from a file of this folder.
MAX_QUOTE = 300
# fsync leaves a file in a Mac's drive cache; only F_FULLFSYNC makes the file survive a panic.
FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)


class Act(StrEnum):
    """An act that may crash a Mac."""

    MAP = "the first mapping"
    UNMAP = "the first unmapping"
    RELEASE = "the release of a heap"
    RELEASE_TEST = "the release test"
    STRESS = "the stress test"


class FaultMemory:
    """The faults of one backend on this model of machine, system and MLX version."""

    def __init__(self, kv_backend: KVBackend) -> None:
        self._kv_backend = kv_backend
        self._about = {"kv_backend": str(kv_backend), **this_machine().as_json()}
        key = sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        self._fault = f"fault-{key}.json"
        self._intents = f"intent-{key}-"

    def found(self) -> tuple[str, ...]:
        """Return the faults of the backend, each as half a sentence."""
        faults = []
        for path in self._files():
            if path.name == self._fault:
                faults.append(f"{_words(path)} ({_shown(path)})")
            elif _is_left_behind(path):
                faults.append(f"quire or the machine ended within {_words(path)} ({_shown(path)})")
        return tuple(faults)

    @contextmanager
    def intent(self, act: Act) -> Iterator[None]:
        """Write an intent file while the act runs in this context. An exception becomes a fault."""
        intent = self._write_intent(act)
        try:
            yield
        except Exception as error:
            self.record(f"{act} failed: {error}")
            raise
        finally:
            if intent is not None:
                path, file = intent
                path.unlink(missing_ok=True)
                os.close(file)  # releases the lock, once the file is gone

    def record(self, what: str) -> None:
        """Write a fault file, replacing an older one. what: half a sentence about the harm."""
        try:
            _, file = self._write(what, self._fault)
            os.close(file)
        except OSError as error:
            log.warning("a fault of %s cannot be remembered: %s", self._kv_backend, error)

    def forget(self) -> bool:
        """Remove faults and abandoned intents; return whether any were found. Raises OSError."""
        known = [p for p in self._files() if p.name == self._fault or _is_left_behind(p)]
        for path in known:
            path.unlink(missing_ok=True)
        return bool(known)

    def _files(self) -> list[Path]:
        """Return the paths of the fault file and of all intent files, whatever their contents."""
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
            log.warning("%s of %s is not guarded by a file: %s", act, self._kv_backend, error)
            return None

    def _write(self, what: str, name: str | None) -> tuple[Path, int]:
        """Write a file that survives a crash of the machine; return its path and its open, locked
        descriptor. name: None gives an intent's file a unique name. Raises OSError."""
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        file, temporary = mkstemp(dir=folder, prefix=".new-")
        path = folder / (name or self._intents + Path(temporary).name.removeprefix(".new-"))
        at = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            # The file is locked before it gets its name: no process must see it unlocked.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(file, (json.dumps({"what": what, "at": at, **self._about}) + "\n").encode())
            os.fsync(file)
            if FULL_SYNC is not None:
                fcntl.fcntl(file, FULL_SYNC)
            os.replace(temporary, path)
        except OSError:
            os.close(file)
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_folder(folder)
        return path, file


def _is_left_behind(path: Path) -> bool:
    """Return whether the process that wrote an intent died within the act and so lost the lock."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.fstat(file.fileno()).st_nlink > 0  # 0: the act has just ended
    except (FileNotFoundError, BlockingIOError):
        return False
    except OSError:
        return True


def _words(path: Path) -> str:
    try:
        fault = json.loads(path.read_text())
        return f"{fault['what'][:MAX_QUOTE]}, {fault['at'][:MAX_QUOTE]}"
    except (OSError, ValueError, TypeError, KeyError):
        return "something that its file does not tell"


def _shown(path: Path) -> str:
    """Return the path without the user's name, because users share reports."""
    return str(path).replace(str(Path.home()), "~")


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(file)
    os.close(file)
