"""Records which KV backends (kinds of GPU memory) have crashed or failed on this machine.

An *intent* file is written before an act that may crash the machine, and removed afterwards. An
intent that no living process locks means a crash. A *fault* file is written after a failure that
the process survived. After a crash or a failure, quire avoids the backend until ``quire doctor``
has passed."""

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

# The most characters quoted from a fault or intent file.
MAX_QUOTE = 300
# On a Mac, only F_FULLFSYNC makes a file survive a crash; fsync leaves it in the drive's cache.
FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)


class Act(StrEnum):
    """An act that may crash a Mac."""

    MAP = "the first mapping"
    UNMAP = "the first unmapping"
    RELEASE = "the release of a heap"
    RELEASE_TEST = "the release test"
    STRESS = "the stress test"


class FaultMemory:
    """The fault and intent files of one backend for this machine model, system and MLX version."""

    def __init__(self, kv_backend: KVBackend) -> None:
        self._kv_backend = kv_backend
        self._about = {"kv_backend": str(kv_backend), **this_machine().as_json()}
        key = sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        self._fault = f"fault-{key}.json"
        self._intents = f"intent-{key}-"

    def found(self) -> tuple[str, ...]:
        """Return a half sentence about each fault of the backend."""
        faults = []
        for path in self._files():
            if path.name == self._fault:
                faults.append(f"{_words(path)} ({_shown(path)})")
            elif _is_left_behind(path):
                faults.append(f"quire or the machine ended within {_words(path)} ({_shown(path)})")
        return tuple(faults)

    @contextmanager
    def intent(self, act: Act) -> Iterator[None]:
        """Keep an intent file during the act, the body of ``with``. Record exceptions as faults."""
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
        """Write a fault file over an older one. ``what`` is half a sentence about the failure."""
        try:
            _, file = self._write(what, self._fault)
            os.close(file)
        except OSError as error:
            log.warning("a fault of %s cannot be remembered: %s", self._kv_backend, error)

    def forget(self) -> bool:
        """Remove the fault file and intents left by crashes. Return True if there were any. Raises
        OSError."""
        known = [p for p in self._files() if p.name == self._fault or _is_left_behind(p)]
        for path in known:
            path.unlink(missing_ok=True)
        return bool(known)

    def _files(self) -> list[Path]:
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
        """Write a file that survives a crash of the machine. Return its path and its open, locked
        descriptor. If ``name`` is None, the file is an intent with a unique name. Raises
        OSError."""
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        file, temporary = mkstemp(dir=folder, prefix=".new-")
        path = folder / (name or self._intents + Path(temporary).name.removeprefix(".new-"))
        at = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            # Lock the file before naming it: an intent without a lock counts as a crash.
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
    """Return True if no process locks an intent file: its process has crashed during the act."""
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
    """Return the path with "~" for the home folder, because people publish reports."""
    return str(path).replace(str(Path.home()), "~")


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(file)
    os.close(file)
