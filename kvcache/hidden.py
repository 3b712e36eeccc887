"""Gives the rows of a step the hidden states of the tokens before them, and keeps some of its own.

A model's head for drafts pairs each token with the hidden state of the token before it. The first
row of a sequence takes that of an earlier step."""

import errno
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvcache.backends.backend import file_checksum


class HiddenRows:
    """Some rows of a step's hidden states. Each row keeps all of these in memory."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self.array = mx.array(0)
        """The rows ``[N, hidden]``, once the step is built."""

    def add(self, place: int) -> "HiddenRow":
        """Choose the row with this index among the step's rows."""
        self._places.append(place)
        return HiddenRow(self, len(self._places) - 1)

    def take(self, states: mx.array) -> None:
        self.array = states[mx.array(self._places, dtype=mx.int32)]


class HiddenRow(NamedTuple):
    """The hidden state of one token: a row of ``rows``."""

    rows: HiddenRows
    number: int


# The bytes of a hidden state's dtype in a file, as MLX's name.
DTYPE_BYTES = 16


class HiddenRecord(NamedTuple):
    """A hidden state in a file: the name of its dtype and its bytes, padded to float32's."""

    data: bytearray

    @classmethod
    def empty(cls, hidden_size: int) -> "HiddenRecord":
        return cls(bytearray(DTYPE_BYTES + 4 * hidden_size))

    @classmethod
    def of(cls, row: HiddenRow) -> "HiddenRecord":
        array = row.rows.array[row.number]
        record, name = cls.empty(array.size), str(array.dtype).rpartition(".")[2].encode()
        raw = np.array(array.view(mx.uint8)).tobytes()
        record.data[: len(name)] = name
        record.data[DTYPE_BYTES : DTYPE_BYTES + len(raw)] = raw
        return record

    def row(self) -> HiddenRow:
        dtype = getattr(mx, bytes(self.data[:DTYPE_BYTES]).rstrip(b"\0").decode())
        size = (len(self.data) - DTYPE_BYTES) // 4 * dtype.size
        rows = HiddenRows()
        raw = np.frombuffer(bytes(self.data[DTYPE_BYTES : DTYPE_BYTES + size]), np.uint8)
        rows.array = mx.array(raw).view(dtype)[None]
        return HiddenRow(rows, 0)

    def write(self, fd: int) -> int:
        """Write the record, and return its checksum. Raises OSError."""
        if os.pwrite(fd, self.data, 0) < len(self.data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return file_checksum(fd, len(self.data))

    def read(self, fd: int) -> int:
        """Read the record, and return its checksum. Raises OSError."""
        if os.preadv(fd, [self.data], 0) < len(self.data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return file_checksum(fd, len(self.data))


class HiddenStates:
    """The hidden states before the rows of a step."""

    def __init__(
        self,
        before: Sequence[HiddenRow | None],
        counts: Sequence[int],
        kept: Sequence[HiddenRows] = (),
    ) -> None:
        """``before`` and ``counts`` have an item per sequence of the step: the hidden state of the
        token before its first row, or None at the beginning of a prompt, and its number of rows.
        ``kept`` are the rows of this step that later steps may need."""
        self._before = before
        self._counts = counts
        self._kept = kept

    @property
    def arrays(self) -> list[mx.array]:
        return [rows.array for rows in self._kept]

    def first(self) -> mx.array:
        """Return the hidden states before each sequence's first row, ``[S, hidden]``."""
        assert all(self._before), "a hidden state is not computed yet"
        arrays, places = self._joined([])
        return mx.concatenate(arrays)[mx.array(places)]

    def shift(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """Return the hidden state of the token before each row, ``[T, hidden]``, and whether there
        is such a token, 1 or 0, ``[T, 1]``. ``states`` are the hidden states of the rows."""
        for rows in self._kept:
            rows.take(states)
        arrays, firsts = self._joined([states])
        places = list(range(-1, len(states) - 1))
        known = [1] * len(states)
        starts = accumulate(self._counts[:-1], initial=0)
        for start, first, row in zip(starts, firsts, self._before, strict=True):
            places[start] = first
            known[start] = row is not None
        before = mx.concatenate(arrays)[mx.array(places)]
        return before, mx.array(known, dtype=states.dtype)[:, None]

    def _joined(self, arrays: list[mx.array]) -> tuple[list[mx.array], list[int]]:
        """Add the arrays of the rows before to ``arrays``. Return also these rows' places in all
        arrays together, or 0 where no row is before."""
        sources = {id(row.rows): row.rows for row in self._before if row is not None}
        starts, end = {}, sum(len(array) for array in arrays)
        for key, source in sources.items():
            starts[key] = end
            end += len(source.array)
        places = [0 if row is None else starts[id(row.rows)] + row.number for row in self._before]
        return [*arrays, *(source.array for source in sources.values())], places
