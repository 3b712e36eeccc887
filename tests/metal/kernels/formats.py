"""The kernels' three number formats in numpy: bfloat has no dtype there and is kept as uint16."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Stored = NDArray[Any]


@dataclass(frozen=True)
class Format:
    """A format of MSL by its name there."""

    name: str
    dtype: type[np.generic]

    @property
    def bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    def encode(self, numbers: NDArray[Any]) -> Stored:
        """Rounded to nearest even."""
        if self.name != "bfloat":
            return np.ascontiguousarray(numbers).astype(self.dtype)
        bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)

    def decode(self, stored: Stored) -> Floats:
        """The same numbers, wide enough to compute with."""
        if self.name != "bfloat":
            return stored.astype(np.float64)
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def nans(self, *shape: int) -> Stored:
        """An array for results: what a kernel does not write stays NaN."""
        return self.encode(np.full(shape, np.nan))


FLOAT = Format("float", np.float32)
HALF = Format("half", np.float16)
BFLOAT = Format("bfloat", np.uint16)
FORMATS = {f.name: f for f in (FLOAT, HALF, BFLOAT)}
