"""Real backends that break one promise each."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

import metal_ext
from kvcache.backends.backend import PageBackend
from kvcache.backends.choice import KVBackend
from kvcache.backends.posix import PosixBackend
from kvcache.selftest.kv_backend import MAX_TOKENS, SHAPE, small_layout

LAYOUT = small_layout(
    KVBackend.POSIX, SHAPE, max_tokens=MAX_TOKENS, system_page_bytes=metal_ext.SYSTEM_PAGE_BYTES
)


class Liar:
    """A backend that answers some calls as it likes."""

    def __init__(self, backend: PageBackend, **lies: Any) -> None:
        self._backend = backend
        self._lies = lies

    def __getattr__(self, name: str) -> Any:
        return self._lies.get(name, getattr(self._backend, name))


def posix(**lies: Any) -> Any:
    """A posix backend over LAYOUT; lies: its attributes that are different."""
    return Liar(PosixBackend(LAYOUT.groups[0], metal_ext.CpuWorkers(1)), **lies)


class RowsLiar:
    """Rows of a backend, one of whose operations says something else."""

    def __init__(self, rows: Any, operation: str, lie: Callable[[mx.array], mx.array]) -> None:
        self._rows = rows
        self._operation = operation
        self._lie = lie

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._rows, name)
        if name != self._operation:
            return value
        return lambda *arguments: self._lie(value(*arguments))


def with_wrong(operation: str, lie: Callable[[mx.array], mx.array]) -> Any:
    """A posix backend whose rows lie in that operation."""
    backend = PosixBackend(LAYOUT.groups[0], metal_ext.CpuWorkers(1))
    return Liar(backend, rows=lambda segments: RowsLiar(backend.rows(segments), operation, lie))
