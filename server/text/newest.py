"""Keep values that may be asked for again: the newest, up to so many bytes."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Newest(Generic[KeyT, ValueT]):
    """Keep values by their keys; the least recently used ones make room."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all together; 0: none is kept."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[KeyT, tuple[ValueT, int]] = OrderedDict()
        # Values come from the event loop; prompts are made on other threads.
        self._lock = threading.Lock()

    def keep(self, key: KeyT, value: ValueT, size: int) -> None:
        """Keep a value, instead of what had its key. size: its bytes, nearly."""
        with self._lock:
            _, replaced = self._kept.pop(key, (None, 0))
            self._kept[key] = (value, size)
            self._bytes += size - replaced
            while self._bytes > self._max_bytes:
                _, (_, freed) = self._kept.popitem(last=False)
                self._bytes -= freed

    def find(self, key: KeyT) -> ValueT | None:
        """Return the value of a key; None where it is not kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]
