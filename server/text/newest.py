"""A bounded cache that drops the least recently used values."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Newest(Generic[KeyT, ValueT]):
    """A cache of bounded total size, which drops the least recently used values to add new ones."""

    def __init__(self, max_size: int) -> None:
        """``max_size`` limits the sum of all values' sizes, in any unit. With 0, none is kept."""
        self._max_size = max_size
        self._entries: OrderedDict[KeyT, tuple[ValueT, int]] = OrderedDict()
        self.size = 0
        # A lock is needed because the event loop adds values while worker threads read them.
        self._lock = threading.Lock()

    def keep(self, key: KeyT, value: ValueT, size: int = 1) -> list[tuple[KeyT, ValueT]]:
        """Add a value. Return the entries that were dropped to make room, or the new entry itself
        if the value alone is too large."""
        with self._lock:
            self._pop(key)
            if size > self._max_size:
                return [(key, value)]
            self._entries[key] = (value, size)
            self.size += size
            dropped = []
            while self.size > self._max_size:
                oldest = next(iter(self._entries))
                dropped.append((oldest, self._entries[oldest][0]))
                self._pop(oldest)
            return dropped

    def find(self, key: KeyT) -> ValueT | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def pop(self, key: KeyT) -> ValueT | None:
        with self._lock:
            return self._pop(key)

    def pop_oldest(self) -> bool:
        """Drop the least recently used value. Return False if the cache is empty."""
        with self._lock:
            return bool(self._entries) and self._pop(next(iter(self._entries))) is not None

    def _pop(self, key: KeyT) -> ValueT | None:
        value, size = self._entries.pop(key, (None, 0))
        self.size -= size
        return value
