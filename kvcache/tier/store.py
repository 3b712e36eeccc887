"""A folder of records, each a file that a key finds. Several processes may share it.

``records/xx/<key>`` has the bytes of a record, ``index`` says which there are (index.py). A file is
synced before its entry, and a removal is in the index before the file goes: a file without an entry
is garbage, an entry without a file is a miss, and a process may be killed at any moment. The file
``lock`` is locked while the index changes, never while bytes of records move. A file that is being
filled is locked itself, so that nobody takes it for garbage. ``lock`` has MARK in it, too: a folder
of the user's own files is refused before anything in it changes.
"""

import errno
import fcntl
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from kvcache.tier.index import DAY_S, HOUR_S, LAYOUT, NOTHING, Books, Kind, Record, encode, is_whole

BURST_BYTES = 1 << 30
# By default a folder holds a tenth of the free space and its own bytes, at most HELD_BYTES.
HELD_BYTES = 16 << 30
HELD_SHARE = 10
REST_S = 60.0  # for so long nothing is written after a failure
ORPHAN_S = 3600.0
TMUTIL_S = 30.0
# How long to wait for a process that holds the lock, and how often to look.
LOCK_LIMIT_S, LOCK_POLL_S = 10.0, 0.005
MAX_NAME_BYTES = 1024
MARK = b"quire keeps prefixes in this folder\n"
TAG, KEY = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe of this name would wait
MARKING = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
GROWING = MARKING | os.O_APPEND
NAMING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
NO_WAIT = fcntl.LOCK_EX | fcntl.LOCK_NB
# What fcntl() is told to read past the system's cache. 48 is macOS's F_NOCACHE.
PAST_CACHE = (48, 1) if sys.platform == "darwin" else (fcntl.F_SETFL, getattr(os, "O_DIRECT", 0))

# Writes a record's bytes to a descriptor, from offset 0, and returns their checksum.
Fill = Callable[[int], int]
# Reads this number of bytes from a descriptor, and returns their checksum.
Check = Callable[[int, int], int]


class System:
    """The calls that may fail, so that tests let them. What a Mac's drive loses with its power
    although it is synced, a checksum tells."""

    platform: str = sys.platform
    open = staticmethod(os.open)
    mkdir = staticmethod(os.mkdir)
    pread = staticmethod(os.pread)
    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    ftruncate = staticmethod(os.ftruncate)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    flock = staticmethod(fcntl.flock)
    fcntl = staticmethod(fcntl.fcntl)
    past_cache = PAST_CACHE
    run: Callable[..., object] = staticmethod(subprocess.run)


@dataclass(frozen=True)
class TierLimits:
    """What a folder may hold and all of its processes may write, in bytes. ``per_second`` is of one
    process, beyond BURST_BYTES."""

    held: int
    per_second: int = 256 << 20
    per_hour: int = 8 << 30
    per_day: int = 40 << 30


@dataclass(frozen=True)
class WriteFailure:
    """Not all was written. It may be tried again after ``delay_s``."""

    reason: str
    delay_s: float


class ReadResult(Enum):
    """What became of a reading."""

    OK = auto()
    GONE = auto()
    BROKEN = auto()  # the bytes were damaged or unreadable, and the record has been removed
    FAILED = auto()  # the system failed, and the record stays


@dataclass(frozen=True)
class ModelSummary:
    """The records of a model."""

    tag: bytes
    name: str
    records: int
    nbytes: int
    last_use_s: float


@dataclass(frozen=True)
class Summary:
    """What a folder holds, and what was written to it."""

    models: list[ModelSummary]
    held_bytes: int
    limit_bytes: int
    hour_bytes: int
    day_bytes: int


def usual_held_bytes(folder: Path) -> int:
    """Return the default of ``TierLimits.held``. Raises OSError."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    books = Books()
    with suppress(OSError, ValueError):
        books.take((folder / "index").read_bytes())
    return min(HELD_BYTES, (shutil.disk_usage(there).free + books.held_bytes) // HELD_SHARE)


class RecordStore:
    """Raises RuntimeError or OSError if the folder cannot be used. ``clock`` tells seconds since
    1970, and may jump. All methods may be called by any thread."""

    def __init__(
        self,
        folder: Path,
        limits: TierLimits,
        *,
        clock: Callable[[], float] = time.time,
        system: System | None = None,
    ) -> None:
        self.limits = limits
        self._path, self._clock, self._system = folder.absolute(), clock, system or System()
        self._mutex = threading.RLock()
        self._books, self._end = Books(), 0
        self._uses: dict[bytes, float] = {}
        self._names: dict[bytes, str] = {}
        self._wasted = b""  # entries of bytes written in vain, which the index did not take
        self._credit_bytes, self._credit_at = float(BURST_BYTES), clock()
        self._failed_at = -math.inf
        self._files, self._index_file = ExitStack(), ExitStack()
        self._files.callback(self._index_file.close)
        try:
            self._open_folder()
            with self._locked():
                self._sweep(ORPHAN_S)
                if self._books.is_ahead(now := clock()):
                    with suppress(OSError):  # else each process counts it from its own start on
                        self._replace_index(self._books.anew(now))
        except BaseException:
            self._files.close()
            raise

    @property
    def held_bytes(self) -> int:
        return self._books.held_bytes

    def find(self, key: bytes) -> Record | None:
        return self._books.records.get(key)  # without the mutex: it may be held while a disk syncs

    def use(self, keys: Sequence[bytes]) -> None:
        """Note a hit. It comes into the index with the next change of it."""
        now = self._clock()
        for key in keys:
            if key in self._books.records:
                self._books.last_use[key] = self._uses[key] = now

    def delay_of_write(self, nbytes: int) -> float:
        """Return the seconds until the bounds allow to write ``nbytes``: 0 is now, inf is never."""
        with self._mutex:
            now, limits = self._clock(), self.limits
            passed_s, failed_s = max(0.0, now - self._credit_at), now - self._failed_at
            credit = self._credit_bytes + passed_s * limits.per_second
            self._credit_bytes, self._credit_at = min(credit, BURST_BYTES), now
            return max(
                0.0,
                REST_S - failed_s if failed_s >= 0 else 0.0,
                (min(nbytes, BURST_BYTES) - self._credit_bytes) / limits.per_second,
                self._books.delay_of_write(nbytes, HOUR_S, limits.per_hour, now),
                self._books.delay_of_write(nbytes, DAY_S, limits.per_day, now),
                math.inf if nbytes > limits.held else 0.0,
            )

    def write(self, batch: Sequence[tuple[Record, Fill]]) -> int | WriteFailure:
        """Write records that are not there yet, and return their bytes. All are open at once."""
        begun: list[tuple[Record, Fill, int]] = []
        try:
            with self._locked():
                new = {one.key: (one, fill) for one, fill in batch if self.find(one.key) is None}
                nbytes = sum(one.nbytes for one, _ in new.values())
                if nbytes and (delay_s := self.delay_of_write(nbytes)):
                    return WriteFailure("the bounds of bytes and rate do not allow it", delay_s)
                self._credit_bytes -= nbytes
                self._make_room(nbytes)
                for one, fill in new.values():
                    self._begin(one, fill, begun)
            done = [self._fill(*each) for each in begun]
            for name in {one.key.hex()[:2] for one in done}:
                with self._opened(name, FOLDER, self._records) as folder:
                    self._system.fsync(folder)
            nbytes = sum(one.nbytes for one in done)
            with self._locked():
                self._make_room(nbytes)  # another process may have written meanwhile
                self._append(Kind.ADD, done)
                self._compact()
            return nbytes
        except OSError as error:
            self._undo(begun)
            self._failed_at = self._clock()
            reason = f"{self._path}: {error.strerror}, nothing is written for {REST_S:.0f} s"
            return WriteFailure(reason, REST_S)
        finally:
            for _, _, file in begun:
                os.close(file)

    def read(self, key: bytes, check: Check) -> ReadResult:
        record = self.find(key)
        if record is None:
            return ReadResult.GONE
        try:
            with (
                self._opened(key.hex()[:2], FOLDER, self._records) as folder,
                self._opened(key.hex(), READ, folder) as file,
            ):
                is_whole = os.fstat(file).st_size == record.nbytes
                is_whole = is_whole and self._check(file, record.nbytes, check) == record.checksum
            result = ReadResult.OK if is_whole else ReadResult.BROKEN
        except FileNotFoundError:
            result = ReadResult.GONE
        except OSError as error:
            is_of_file = error.errno in (errno.ELOOP, errno.EIO)
            result = ReadResult.BROKEN if is_of_file else ReadResult.FAILED
        if result in (ReadResult.GONE, ReadResult.BROKEN):
            with suppress(OSError), self._locked():
                if self.find(key) == record:  # else another process has written it anew
                    self._remove([record])
        return result

    def _check(self, file: int, nbytes: int, check: Check) -> int:
        """Read past the system's cache where the file system and the memory allow that: it takes
        less time, and the bytes lie in memory once."""
        command, value = self._system.past_cache
        try:
            self._system.fcntl(file, command, value)
            return check(file, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        with suppress(OSError):
            self._system.fcntl(file, command, 0)
        return check(file, nbytes)

    def name_model(self, tag: bytes, name: str) -> None:
        """Name a model for people. Without a disk that takes it, it has no name."""
        self._names[tag] = name
        with suppress(OSError), self._opened(tag.hex(), NAMING, self._folder) as file:
            self._system.write(file, name.encode())

    def refresh(self) -> None:
        """Take over what other processes have written and removed."""
        with suppress(OSError), self._locked():
            pass

    def shrink(self) -> None:
        """Remove what is above the bound, as one that was lowered leaves it. Opening does not:
        whoever only looks may have another bound."""
        with suppress(OSError), self._locked():
            self._make_room(0)

    def clear(self, model: bytes | None = None, tenant: bytes | None = None) -> tuple[int, int]:
        """Remove all records, or those of a model, of a tenant, or of both. Return how many, and
        their bytes. Of all, only the sums of bytes written stay, and the names that stores which
        are open have given. Raises OSError."""
        with self._locked():
            every = self._books.records.values()
            gone = [one for one in every if model in (None, one.model)]
            gone = [one for one in gone if tenant in (None, one.tenant)]
            self._remove(gone)
            if model is tenant is None:
                self._sweep(0.0)
                for name in filter(TAG.fullmatch, os.listdir(self._folder)):
                    self._system.unlink(name, dir_fd=self._folder)
                self._replace_index(self._books.anew(self._clock()))
            return len(gone), sum(one.nbytes for one in gone)

    def verify(self, check: Check) -> dict[ReadResult, list[bytes]]:
        """Read all records. Return the keys by what became of each; broken ones are removed."""
        self.refresh()
        results = {key: self.read(key, check) for key in list(self._books.records)}
        return {one: [key for key in results if results[key] is one] for one in ReadResult}

    def summary(self) -> Summary:
        self.refresh()
        with self._mutex:
            books, now, models = self._books, self._clock(), []
            for tag in sorted({one.model for one in books.records.values()}):
                own = [one for one in books.records.values() if one.model == tag]
                last_use = max(books.last_use[one.key] for one in own)
                nbytes = sum(one.nbytes for one in own)
                models.append(ModelSummary(tag, self._name(tag), len(own), nbytes, last_use))
            hour, day = (books.written_within(window, now) for window in (HOUR_S, DAY_S))
            return Summary(models, books.held_bytes, self.limits.held, hour, day)

    def _name(self, tag: bytes) -> str:
        with suppress(OSError):
            return self._head(tag.hex(), MAX_NAME_BYTES).decode(errors="replace")
        return ""

    def _head(self, name: str, nbytes: int) -> bytes:
        with suppress(FileNotFoundError), self._opened(name, READ, self._folder) as file:
            return self._system.pread(file, nbytes, 0)
        return b""

    def close(self) -> None:
        """Write what use() has noted. No thread may still read or write."""
        with self._mutex:
            if self._uses:
                with suppress(OSError), self._locked():
                    self._append(Kind.USE, [])
                    self._compact()
            self._books, self._uses = Books(), {}
            self._files.close()

    def _open_folder(self) -> None:
        system, path, keep = self._system, self._path, self._files.enter_context
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            system.mkdir(path, 0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            reason = "must be a folder of your own, and no link"
            raise RuntimeError(f"{path} {reason}: remove it, or name another place")
        self._folder = keep(self._opened(str(path), FOLDER, None))
        if not self._is_ours():
            reason = "has files that are not of quire's prefixes"
            raise RuntimeError(f"{path} {reason}: name a new or an empty folder")
        with suppress(FileExistsError):
            system.mkdir("records", 0o700, dir_fd=self._folder)
        self._records = keep(self._opened("records", FOLDER, self._folder))
        self._lock = keep(self._opened("lock", MARKING, self._folder))
        if system.pread(self._lock, len(MARK), 0) != MARK:
            self._write_all(self._lock, MARK)
            system.fsync(self._lock)
        for file, mode in (self._folder, 0o700), (self._records, 0o700), (self._lock, 0o600):
            os.fchmod(file, mode)
        self._open_index()
        if is_new and system.platform == "darwin":
            # Backups need no prefixes, which can be computed again. A failure here does no harm.
            with suppress(OSError, subprocess.SubprocessError):
                command = ["/usr/bin/tmutil", "addexclusion", str(path)]
                system.run(command, capture_output=True, timeout=TMUTIL_S, check=False)

    def _is_ours(self) -> bool:
        """Tell a folder that is marked, or whose index begins with an entry, or that has no more
        than what a first opening that was killed leaves."""
        begun = {self._path / name for name in ("records", "lock", "index")}
        is_begun = begun.issuperset([*self._path.glob("*"), *self._path.glob("records/*")])
        # In this order: others that open the folder meanwhile mark it before all other changes.
        head = self._head("index", LAYOUT.size)
        mark = self._head("lock", len(MARK))
        return mark == MARK or is_whole(head) or (is_begun and not head and MARK.startswith(mark))

    @contextmanager
    def _opened(self, name: str, flags: int, folder: int | None) -> Iterator[int]:
        file = self._system.open(name, flags, 0o600, dir_fd=folder)
        try:
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, and know all entries."""
        with self._mutex:
            self._wait_for_lock()
            try:
                self._check_folder()
                self._catch_up()
                yield
            finally:
                self._system.flock(self._lock, fcntl.LOCK_UN)

    def _wait_for_lock(self) -> None:
        """Lock the folder. Raises OSError if another process holds the lock for too long, as one
        that is stopped does."""
        end = time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                return self._system.flock(self._lock, NO_WAIT)
            except BlockingIOError as error:
                if time.monotonic() > end:
                    reason = f"another process has held its lock for {LOCK_LIMIT_S:.0f} s"
                    raise OSError(errno.ETIMEDOUT, reason) from error
            time.sleep(LOCK_POLL_S)

    def _check_folder(self) -> None:
        """Raises OSError if the folder was removed, or emptied and filled by others. No record is
        found then. The next call reads a folder that has come back."""
        for name, file in ("lock", self._lock), ("records", self._records):
            try:
                is_same = os.path.samestat(os.stat(self._path / name), os.fstat(file))
            except OSError:
                is_same = False
            if not is_same:
                self._books, self._end = Books(), 0
                raise OSError(errno.ESTALE, "the folder was removed: start again to use a new one")

    def _sweep(self, older_than_s: float) -> None:
        """Remove files that have no entry and that no writer is filling."""
        known, now = {key.hex() for key in self._books.records}, self._clock()
        for shelf in os.listdir(self._records):
            with suppress(OSError), self._opened(shelf, FOLDER, self._records) as folder:
                for name in set(os.listdir(folder)) - known:
                    written_at = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
                    is_old = abs(now - written_at) >= older_than_s
                    is_ours = KEY.fullmatch(name) and name[:2] == shelf
                    if is_ours and is_old and not self._is_being_filled(name, folder):
                        self._system.unlink(name, dir_fd=folder)

    def _open_index(self) -> None:
        index = self._system.open("index", GROWING, 0o600, dir_fd=self._folder)
        self._index_file.close()
        self._index_file.callback(os.close, index)
        self._index, self._end = index, 0
        os.fchmod(self._index, 0o600)
        self._system.fsync(self._folder)

    def _catch_up(self) -> None:
        """Read the entries that are new, or all of an index that is new."""
        there = os.stat("index", dir_fd=self._folder, follow_symlinks=False)
        is_ours = os.path.samestat(there, os.fstat(self._index))
        if not is_ours or there.st_size < self._end:
            self._open_index()
            for tag, name in list(self._names.items()):  # a clearing of all removes them
                self.name_model(tag, name)
        data, size = b"", os.fstat(self._index).st_size - self._end
        while more := self._system.pread(self._index, size - len(data), self._end + len(data)):
            data += more
        # Others find the old entries until the new ones are whole.
        books = self._books if self._end else Books()
        try:
            books.take(b"" if self._end else self._wasted)
            whole = books.take(data)
        except ValueError:
            self._replace_index(b"")
            return self._sweep(0.0)
        self._books, self._end = books, self._end + whole
        return self._system.ftruncate(self._index, self._end) if whole < size else None

    def _append(self, kind: Kind, records: list[Record]) -> None:
        """Append entries of records and of noted uses. If that fails, some entries may be in the
        file: the next _catch_up() takes over the whole ones, and cuts the rest."""
        data = b"".join(encode(kind, self._clock(), one) for one in records)
        while self._uses:
            key, used_at = self._uses.popitem()
            if record := self.find(key):
                data += encode(Kind.USE, used_at, record)
        self._write_all(self._index, data)
        self._system.fsync(self._index)
        self._end += self._books.take(data)

    def _compact(self) -> None:
        if fewer := self._books.compacted(self._clock()):
            self._replace_index(fewer)

    def _write_all(self, file: int, data: bytes) -> None:
        while data:
            data = data[self._system.write(file, data) :]

    def _replace_index(self, data: bytes) -> None:
        with suppress(FileNotFoundError):
            self._system.unlink("index.new", dir_fd=self._folder)
        with self._opened("index.new", NEW, self._folder) as file:
            self._write_all(file, data)
            self._system.fsync(file)
        self._system.rename("index.new", "index", src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._wasted = b""
        self._system.fsync(self._folder)
        self._catch_up()

    def _make_room(self, nbytes: int) -> None:
        excess = self._books.held_bytes + nbytes - self.limits.held
        if excess > 0:
            self._remove(self._books.cheapest(excess, self._clock()))

    def _remove(self, records: list[Record]) -> None:
        if not records:
            return
        try:
            self._append(Kind.REMOVE, records)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The files leave room for the entries. An entry without a file is a miss.
            for one in records:
                self._unlink(one.key)
            self._catch_up()
            self._append(Kind.REMOVE, [one for one in records if self.find(one.key) is not None])
        for one in records:
            self._unlink(one.key)

    def _unlink(self, key: bytes) -> None:
        """Remove a file that has no entry. If that fails, a later _sweep() does it."""
        with suppress(OSError), self._opened(key.hex()[:2], FOLDER, self._records) as folder:
            self._system.unlink(key.hex(), dir_fd=folder)

    def _begin(self, record: Record, fill: Fill, begun: list[tuple[Record, Fill, int]]) -> None:
        """Make the file of a record and add it to ``begun``, unless another writer fills it."""
        name = record.key.hex()
        with suppress(FileExistsError):
            self._system.mkdir(name[:2], 0o700, dir_fd=self._records)
            self._system.fsync(self._records)
        with self._opened(name[:2], FOLDER, self._records) as folder:
            if self._is_being_filled(name, folder):
                return
            with suppress(FileNotFoundError):
                self._system.unlink(name, dir_fd=folder)
            file = self._system.open(name, NEW, 0o600, dir_fd=folder)
            begun.append((record, fill, file))
            self._system.flock(file, NO_WAIT)

    def _undo(self, begun: list[tuple[Record, Fill, int]]) -> None:
        """Remove files that have no entry after all. What is in them counts as written."""
        with self._mutex:
            lost = {one.key: os.fstat(file).st_size for one, _, file in begun}
            try:
                with self._locked():
                    lost = {key: size for key, size in lost.items() if self.find(key) is None}
                    for key in lost:
                        self._unlink(key)
                    if lost:
                        self._append(Kind.WRITTEN, [replace(NOTHING, nbytes=sum(lost.values()))])
            except OSError:
                waste = replace(NOTHING, nbytes=sum(lost.values()))
                data = encode(Kind.WRITTEN, self._clock(), waste)
                self._wasted += data
                self._books.take(data)

    def _is_being_filled(self, name: str, folder: int) -> bool:
        try:
            with self._opened(name, READ, folder) as file:
                self._system.flock(file, NO_WAIT)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def _fill(self, record: Record, fill: Fill, file: int) -> Record:
        checksum = fill(file)
        assert os.fstat(file).st_size == record.nbytes, "the file has other bytes than its record"
        self._system.fsync(file)
        return replace(record, checksum=checksum)
