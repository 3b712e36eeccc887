"""Records which KV backends (kinds of GPU memory) have crashed or failed on this machine.

An *intent* file is written before an act that may crash the machine, and removed afterwards. An
intent that no living process locks means a crash; the intent to serve does so only if the machine
has started again since. A *fault* file is written after a failure that the process survived. After
a failure, or a crash (two of them while serving), quire avoids the backend until tests of ``quire
doctor`` have passed."""

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from enum import Enum, StrEnum
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from tempfile import mkstemp
from typing import Any

from kvcache.backends.choice import KVBackend
from kvcache.selftest.machine import boot_id, this_machine
from kvcache.user_folders import cache_folder

SHORTER = "takes shorter steps"
AVOIDED = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 in the server's environment, or a closed lid, avoids it"


class GPUFailure(Enum):
    """A kind of failure. ``words`` is a pattern for Metal's name or description of the error;
    ``cause`` and ``next_start`` (what the server's next start does) are for people."""

    KV_MEMORY = (
        "PageFault|Address Fault",
        "the GPU met memory of K and V that is not mapped",
        "uses another KV backend",
    )
    INTERACTIVITY = (
        "Impacting ?Interactivity",
        f"macOS stopped the GPU's work because it held up the display; {AVOIDED}",
        SHORTER,
    )
    TIMEOUT = (
        "ErrorTimeout|GPU Timeout|ErrorHang|GPU Hang",
        f"macOS stopped the GPU's work because it took too long; {AVOIDED}",
        SHORTER,
    )
    OUT_OF_MEMORY = (
        "OutOfMemory|Insufficient Memory",
        "the GPU has run out of memory",
        "computes fewer tokens at a time",
    )
    # These follow another failure, of this process or of another one.
    IGNORED = (
        r"SubmissionsIgnored|Ignored \(for causing|InnocentVictim|Discarded \(victim",
        "the GPU refuses work after an earlier failure",
        "gets a new queue of the GPU",
    )

    def __init__(self, words: str, cause: str, next_start: str) -> None:
        self.words, self.cause = words, cause
        self.advice = f"{cause}; the server's next start {next_start}: send the request again then"

    @classmethod
    def of(cls, message: str) -> "GPUFailure | None":
        """Return the kind that a message names, or None. A cause comes before its consequence."""
        return next((kind for kind in cls if re.search(kind.words, message)), None)


log = logging.getLogger(__name__)

# The most characters quoted from a fault or intent file.
MAX_QUOTE = 300
# The first part of the names of journals of engines that died (engine/journal.py).
DEATHS = "deaths-"
# The number of crashes of the machine while a backend served, after which the backend is avoided.
MAX_CRASHES = 2
# On a Mac, only F_FULLFSYNC makes a file survive a crash; fsync leaves it in the drive's cache.
FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)


class Act(StrEnum):
    """An act that may crash a Mac."""

    MAP = "the first mapping"
    UNMAP = "the first unmapping"
    RELEASE = "the release of a heap"
    RELEASE_TEST = "the release test"
    STRESS = "the stress test"
    SERVE = "serving"


# The acts under load, after which a stress test must pass.
UNDER_LOAD = (Act.STRESS, Act.SERVE)


class FaultMemory:
    """The fault and intent files of one backend for this machine model, system and MLX version."""

    def __init__(self, kv_backend: KVBackend) -> None:
        self._kv_backend = kv_backend
        self._about = {"kv_backend": str(kv_backend), **this_machine().as_json()}
        self._key = sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        self._fault = f"fault-{self._key}.json"

    def found(self) -> tuple[str, ...]:
        """Return a half sentence about each fault of the backend."""
        faults = [
            ("" if path.name == self._fault else "quire or the machine ended within ")
            + _words(path)
            for path in self._left()
            if _field(path, "what") != Act.SERVE
        ]
        crashes = self._crashes()
        return (*faults, *(crashes if len(crashes) >= MAX_CRASHES else ()))

    def warning(self) -> str:
        """Return a sentence about crashes while the backend served, if they are too few to avoid
        it, or ""."""
        crashes = self._crashes()
        if not 0 < len(crashes) < MAX_CRASHES:
            return ""
        return (
            f"{crashes[-1]}: the next time, another KV backend serves; `quire doctor --stress` "
            "tries this one under load, and forgets this where it passes"
        )

    def _crashes(self) -> tuple[str, ...]:
        """Return a half sentence about each start of the machine that ended while it served."""
        left = {str(_field(path, "boot")): path for path in self._sessions()}
        left.pop(boot_id(), None)
        what = f"this machine went down while quire served from {self._kv_backend}"
        return tuple(f"{what}: {_words(path)}" for path in left.values())

    def _sessions(self) -> list[Path]:
        """Return the intents to serve that were left behind."""
        return [path for path in self._left() if _field(path, "what") == Act.SERVE]

    def session(self) -> AbstractContextManager[None]:
        """Keep an intent to serve in this context. Forget those that killed processes have left
        since the machine's start, because they say nothing about the machine."""
        boot = boot_id()
        for path in self._sessions():
            if _field(path, "boot") == boot:
                with suppress(OSError):
                    path.unlink()
        return self.intent(Act.SERVE)

    @contextmanager
    def intent(self, act: Act) -> Iterator[None]:
        """Keep an intent file during the act, the body of ``with``. Record exceptions as faults."""
        intent = self._try_to_write(f"intent-{self._key}-{token_hex(8)}", act, act)
        try:
            yield
        except Exception as error:
            self.record(str(error), act)
            raise
        finally:
            if intent is not None:
                path, file = intent
                path.unlink(missing_ok=True)
                os.close(file)  # releases the lock, once the file is gone

    def record(self, why: str, act: Act = Act.SERVE) -> None:
        """Write a fault file, over an older one, about an act that failed. Do nothing if ``why``
        names a failure of the GPU for which another backend is no remedy."""
        if GPUFailure.of(why) not in (None, GPUFailure.KV_MEMORY):
            return
        fault = self._try_to_write(self._fault, act, f"{act} failed: {why}")
        if fault is not None:
            os.close(fault[1])

    def forget(self, *, stressed: bool) -> bool:
        """Remove the fault file, and intents and sessions that crashes left. Unless the backend has
        passed a stress test (``stressed``), keep what happened under load. Return True if any file
        was removed. Raises OSError."""
        forgotten = [p for p in self._left() if stressed or _field(p, "under_load") is False]
        for path in forgotten:
            path.unlink(missing_ok=True)
        return bool(forgotten)

    def _files(self) -> list[Path]:
        return sorted(cache_folder().glob(f"*-{self._key}*"))

    def _left(self) -> list[Path]:
        """Return the fault file, and the intents that were left behind."""
        return [p for p in self._files() if p.name == self._fault or _is_left_behind(p)]

    def _try_to_write(self, name: str, act: Act, what: str) -> tuple[Path, int] | None:
        more = {"what": what, "under_load": act in UNDER_LOAD, "boot": boot_id()}
        try:
            return write_record(name, more | self._about)
        except OSError as error:
            log.warning("%s: %s is not written down: %s", self._kv_backend, what, error)
            return None


def forget_deaths() -> None:
    """Delete the journals of all models. Raises OSError."""
    for path in cache_folder().glob(f"{DEATHS}*.json"):
        path.unlink(missing_ok=True)


def write_record(name: str, record: dict[str, Any]) -> tuple[Path, int]:
    """Write a file of the cache folder that survives a crash of the machine, with the time ("at").
    Return its path and its open, locked descriptor. Raises OSError."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    file, temporary = mkstemp(dir=folder, prefix=".new-")
    path = folder / name
    at = {"at": datetime.now(UTC).isoformat(timespec="seconds")}
    try:
        # Lock the file before naming it: an intent without a lock counts as a crash.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, (json.dumps(record | at) + "\n").encode())
        write_through(file)
        os.replace(temporary, path)
    except OSError:
        os.close(file)
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    return path, file


def read_record(path: Path) -> dict[str, Any]:
    """Read a file of ``write_record``. Return {} if the file is missing or is no record."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _field(path: Path, name: str) -> Any:
    return read_record(path).get(name, "")


def write_through(file: int) -> None:
    """Write an open file to the disk, past the cache of its drive. Raises OSError."""
    os.fsync(file)
    if FULL_SYNC is not None:
        fcntl.fcntl(file, FULL_SYNC)


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
    """Return what a file tells, and the path with "~" for the home folder, because people publish
    reports."""
    record = read_record(path)
    what, at = record.get("what"), record.get("at")
    shown = str(path).replace(str(Path.home()), "~")
    if not (isinstance(what, str) and isinstance(at, str) and what):
        return f"something that its file does not tell ({shown})"
    return f"{what[:MAX_QUOTE]}, {at[:MAX_QUOTE]} ({shown})"


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(file)
    os.close(file)
