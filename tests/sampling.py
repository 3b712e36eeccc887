"""The sampler as a step uses it: rows of sequences, their masks, and what their constraints say."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.core as mx
import numpy as np

from engine.step.constraints import accept, sampling_state
from engine.step.plan import Sampling
from engine.step.sampler import sample
from engine.step.sequence import SamplingRow, Sequence, plan_entry
from metal_ext import CpuWorkers


def sampling_of(sequence: Sequence) -> Sampling:
    """Return how a sequence's next token is chosen, when all before the last one are computed."""
    sequence.progress.restart_at(sequence.num_tokens - 1)
    sampling = plan_entry(sequence, sequence.num_tokens, newest_plan=0).sampling
    assert sampling is not None
    return sampling


def sample_next(
    logits: mx.array, sequences: SequenceOf[Sequence], workers: CpuWorkers | None = None
) -> list[Any]:
    """Return the outcome of each sequence. logits: ``[R, vocab]``, one row for each."""
    state = sampling_state([SamplingRow(each) for each in sequences], logits.shape[-1])
    pending = sample(logits, [sampling_of(each) for each in sequences], state, workers)
    mx.eval(pending.arrays)
    return [accept(*pair) for pair in zip(sequences, pending.read(), strict=True)]


def exact_noise(keys: np.ndarray, vocab: int) -> np.ndarray:
    """Return the Gumbel noise ``[R, vocab]`` of uint32 ``keys`` ``[R, 2]``, in float64."""
    mixed = np.arange(vocab, dtype=np.uint32) ^ keys[:, :1]
    mixed = (mixed ^ mixed >> 16) * np.uint32(0x7FEB352D)
    mixed = (mixed ^ mixed >> 15 ^ keys[:, 1:]) * np.uint32(0x846CA68B)
    noise: np.ndarray = -np.log(-np.log1p((mixed ^ mixed >> 16) * -(2.0**-32)))
    return noise
