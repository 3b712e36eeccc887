"""Prefixes on disk in a life, and in the next one after a restart, on a disk that has faults."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from kvcache.tier.store import RecordStore, System, TierLimits
from kvcache.tier.tier import DiskTier
from tests.kvcache.tier.records import FAILING
from tests.kvcache.tier.workers import PlayedWorkers
from tests.simulation.world import World

LIVES = 2
EPOCH_S = 1e9
LIFE_S = 1e6


class FlakySystem(System):
    """Fails calls at random."""

    def __init__(self, rng: Random, rate: float) -> None:
        for kind in FAILING:
            setattr(self, kind, self._wrap(kind, getattr(System, kind), rng, rate))

    def _wrap(
        self, kind: str, call: Callable[..., Any], rng: Random, rate: float
    ) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if arguments[1:] != (8,) and rng.random() < rate:  # LOCK_UN
                code = rng.choice((errno.EIO, errno.ENOSPC, errno.EROFS))
                raise OSError(code, os.strerror(code))
            return None if kind == "fsync" else call(*arguments, **options)

        return wrapped


class Disk:
    """A folder that outlives the engines of a seed."""

    def __init__(self, seed: int, world: World) -> None:
        self._folder = TemporaryDirectory(prefix="quire-lives-")
        self._rng = Random(f"{seed} disk")
        assert world.disk_fault_rate is not None
        self._rate = world.disk_fault_rate
        self._owners: list[dict[int, object]] = [{} for _ in world.layout.groups]
        self._store: RecordStore | None = None
        self.lives = 0

    def join(self, machine: Any) -> None:
        """Give the engine's cache the folder, if it can be opened."""
        for memory, owners in zip(machine.memories, self._owners, strict=True):
            memory.owners = owners
        self.lives += 1
        rng, clock, born_s = self._rng, machine.clock, EPOCH_S + self.lives * LIFE_S
        held = rng.choice((3, 20, 2000)) * machine.memory.group.block_bytes
        system = FlakySystem(rng, self._rate)
        folder, limits = Path(self._folder.name) / "prefixes", TierLimits(held)
        try:
            self._store = RecordStore(folder, limits, clock=lambda: born_s + clock(), system=system)
        except (OSError, RuntimeError):
            return
        token_s, held_rate = rng.choice((0.0, 1e-5, 0.01, 0.1)), rng.choice((0.0, 0.3, 0.7, 0.99))
        machine.workers = PlayedWorkers(
            holds=lambda: rng.random() < held_rate, begins=lambda: rng.random() < 0.5
        )
        kv = machine.kv
        kv._tier = DiskTier(
            self._store,
            kv._groups,
            tag=b"simulated",
            tokens_per_block=machine.memory.group.tokens_per_block,
            prepare=kv._finish_mappings,
            seconds=lambda start, end: token_s * (end - start),
            clock=clock,
            workers=machine.workers,
        )

    def restart(self) -> bool:
        """End a life, and damage some bytes. Return whether another life follows."""
        if self._store is not None:
            self._store.close()
        if self.lives == LIVES:
            self._folder.cleanup()
            return False
        for path in sorted(Path(self._folder.name).rglob("*")):
            if path.is_file() and path.stat().st_size and self._rng.random() < self._rate:
                data = bytearray(path.read_bytes())
                data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
                path.write_bytes(data)
        return True
