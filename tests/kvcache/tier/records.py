"""Stores of small records for tests, a clock that they set, and a system that fails on demand.
As a program, it is a writer, or it kills writers: only a process with one thread forks safely."""

import errno
import hashlib
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcache.tier import index
from kvcache.tier.index import Record
from kvcache.tier.store import ReadResult, RecordStore, System, TierLimits, WriteFailure

NBYTES = 100
SMALL = TierLimits(held=10 * NBYTES)
ROOMY = TierLimits(held=1 << 20)
# Calls that change or read a folder. A lock that cannot be given back is not weather.
FAILING = (*("open", "mkdir", "pread", "write", "fsync", "ftruncate", "rename", "unlink", "flock"),)


class Clock:
    def __init__(self, now: float = 1e9) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FailingSystem(System):
    """Fails the n-th call of one kind from now on, counted from 0, or all from that one on."""

    def __init__(self) -> None:
        self.kind, self.left, self.code, self.stays = "", -1, errno.EIO, False
        for kind in FAILING:
            setattr(self, kind, self._wrap(kind, getattr(System, kind)))

    def fail(self, kind: str, n: int, code: int = errno.EIO, *, stays: bool = False) -> None:
        self.kind, self.left, self.code, self.stays = kind, n, code, stays

    @property
    def has_failed(self) -> bool:
        return self.left < 0

    def _wrap(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if kind == self.kind and arguments[1:] != (8,):  # LOCK_UN
                self.left -= 1
                if self.left == -1 or (self.left < 0 and self.stays):
                    if kind == "write":
                        call(arguments[0], arguments[1][: len(arguments[1]) // 3])
                    raise OSError(self.code, os.strerror(self.code))
            # No test takes the power away, and a disk may take long.
            return None if kind == "fsync" else call(*arguments, **options)

        return wrapped


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def content(record: Record) -> bytes:
    return (record.key * (record.nbytes // len(record.key) + 1))[: record.nbytes]


def record(number: int, **values: Any) -> Record:
    usual: dict[str, Any] = {"nbytes": NBYTES, "saves_s": 1.0, "depth": 0}
    usual |= {"model": b"m" * 16, "tenant": b"t" * 16}
    return Record(key(number), **usual | values)


def fill(one: Record) -> Callable[[int], int]:
    def write(file: int) -> int:
        os.write(file, content(one))
        return zlib.crc32(content(one))

    return write


def check(file: int, nbytes: int) -> int:
    return zlib.crc32(os.pread(file, nbytes, 0))


def write(store: RecordStore, *records: Record) -> int | WriteFailure:
    return store.write([(one, fill(one)) for one in records])


def read(store: RecordStore, number: int) -> ReadResult:
    return store.read(key(number), check)


def kept(store: RecordStore, numbers: range) -> list[int]:
    return [number for number in numbers if store.find(key(number))]


def path_of(folder: Path, number: int) -> Path:
    name = key(number).hex()
    return folder / "records" / name[:2] / name


def files(folder: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in folder.glob("records/*/*")}


def write_and_evict(folder: Path, first: int, batches: int) -> None:
    def slowly(one: Record) -> Callable[[int], int]:
        def write(file: int) -> int:
            os.write(file, content(one)[:50])
            os.write(file, content(one)[50:])
            return zlib.crc32(content(one))

        return write

    index.COMPACT_ENTRIES = 40
    store = RecordStore(folder, SMALL)
    for number in range(first, first + 2 * batches, 2):
        store.write([(one, slowly(one)) for one in (record(number), record(number + 1))])
        store.use([key(used) for used in range(first, number, 7)])
    store.close()


def kill_writers(folder: Path, kills: int, seed: int) -> None:
    """Kill each at a random moment, and look at what it leaves. Print how much garbage it was."""
    moments, clock, garbage = random.Random(seed), Clock(), 0
    for kill in range(kills):
        writer = os.fork()
        if not writer:
            write_and_evict(folder, kill * 1000, 500)
            os._exit(0)
        time.sleep(moments.uniform(0.001, 0.03))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        clock.now = time.time() + 7200  # what it has begun is garbage by then
        left = len(files(folder))
        store = RecordStore(folder, SMALL, clock=clock)
        garbage += left - len(files(folder))
        books_are_exact(store, folder)
        assert store.summary().held_bytes <= SMALL.held
        store.close()
    print(garbage)


def books_are_exact(store: RecordStore, folder: Path) -> None:
    """All records read as they were written, and there is no other file."""
    records = store._books.records
    for one in list(records.values()):
        assert store.read(one.key, check) is ReadResult.OK
        assert one.checksum == zlib.crc32(content(one))
    assert files(folder) == {one.key.hex(): one.nbytes for one in records.values()}
    assert store.summary().held_bytes == sum(files(folder).values())


if __name__ == "__main__":
    work = {"write": write_and_evict, "kill": kill_writers}[sys.argv[1]]
    work(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
