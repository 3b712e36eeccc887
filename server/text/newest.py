"""Keep values that may be asked for again: the newest, up to a total size."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Newest(Generic[KeyT, ValueT]):
    """Keep values by their keys; the least recently used ones make room."""

    def __init__(self, max_size: int) -> None:
        """max_size: of all values together, in the unit of their sizes; 0: none is kept."""
        self._max_size = max_size
        self._entries: OrderedDict[KeyT, tuple[ValueT, int]] = OrderedDict()
        self.size = 0
        # Values come from the event loop; prompts are made on other threads.
        self._lock = threading.Lock()

    def keep(self, key: KeyT, value: ValueT, size: int = 1) -> list[tuple[KeyT, ValueT]]:
        """Keep a value instead of the one of its key. Return what made room; the value itself
        where it is too large alone."""
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
        """Return the value of a key; None where it is not kept."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def pop(self, key: KeyT) -> ValueT | None:
        """Return the value of a key and keep it no longer; None where it is not kept."""
        with self._lock:
            return self._pop(key)

    def pop_oldest(self) -> bool:
        """Keep the least recently used value no longer. Return False where there is none."""
        with self._lock:
            return bool(self._entries) and self._pop(next(iter(self._entries))) is not None

    def _pop(self, key: KeyT) -> ValueT | None:
        value, size = self._entries.pop(key, (None, 0))
        self.size -= size
        return value
