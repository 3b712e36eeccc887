"""Makes vectors of length 1 from the states of last tokens."""

from collections.abc import Sequence as SequenceOf

import mlx.core as mx
import numpy as np

from engine.sampler import PendingSamples
from engine.types import Sampled, Sequence


def pool(states: mx.array, sequences: SequenceOf[Sequence]) -> PendingSamples:
    """Return the vector of each sequence: the state of its last token, at length 1, in float32.

    states: ``[R, hidden]`` after the final norm, any float type.
    """
    wide = states.astype(mx.float32)
    lengths = mx.sqrt(mx.square(wide).sum(axis=-1, keepdims=True))
    vectors = wide / lengths

    def read() -> list[Sampled]:
        found = np.array(vectors)
        # One non-finite number makes the sum non-finite.
        good = np.isfinite(found.sum(axis=-1))
        assert len(found) == len(sequences)
        return [
            Sampled(None, embedding=vector) if ok else Sampled(None)
            for vector, ok in zip(found, good, strict=True)
        ]

    return PendingSamples([vectors], read)
