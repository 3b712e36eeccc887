"""Makes vectors of length 1 from the states of last tokens."""

import mlx.core as mx
import numpy as np

from engine.sampler import PendingSamples
from engine.step_plan import NOT_FINITE, RowError, Vector


def pool(states: mx.array) -> PendingSamples:
    """Return the vector of each row: the state of a last token, at length 1, in float32.

    states: ``[R, hidden]`` after the final norm, any float type.
    """
    wide = states.astype(mx.float32)
    lengths = mx.sqrt(mx.square(wide).sum(axis=-1, keepdims=True))
    vectors = wide / lengths

    def read() -> list[Vector | RowError]:
        found = np.array(vectors)
        # One non-finite number makes the sum non-finite.
        good = np.isfinite(found.sum(axis=-1))
        return [
            Vector(vector) if ok else NOT_FINITE for vector, ok in zip(found, good, strict=True)
        ]

    return PendingSamples([vectors], read)
