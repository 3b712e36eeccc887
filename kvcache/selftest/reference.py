"""The results that kernels should give, computed in float64 by definition."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating]
MAX_SAMPLES = 40
# Added to the sum of squares when queries and keys are scaled to unit vectors.
UNIT_EPS = 1e-6


def attention(
    queries: Numbers, keys: Numbers, values: Numbers, places: NDArray[np.intp], scale: float
) -> NDArray[np.float64]:
    """Causal softmax attention: row i of queries ``[rows, query_heads, head_dim]`` attends to
    positions up to ``places[i]`` of keys and values ``[tokens, kv_heads, head_dim]``."""
    group = queries.shape[1] // keys.shape[1]
    wide = [np.repeat(array.astype(np.float64), group, axis=1) for array in (keys, values)]
    by_head = [array.swapaxes(0, 1) for array in (queries.astype(np.float64), *wide)]
    scores = by_head[0] @ by_head[1].swapaxes(1, 2) * scale
    positions = np.arange(keys.shape[0])
    scores[:, positions[None] > places[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended: NDArray[np.float64] = (weights @ by_head[2]).swapaxes(0, 1)
    return attended


def sample_rows(count: int) -> NDArray[np.intp]:
    """Return the indices of a chunk's rows to compare, including the first and the last row."""
    return np.unique(np.linspace(0, count - 1, MAX_SAMPLES).astype(np.intp))


def rms_norm(rows: Numbers, weight: Numbers, eps: float) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    size = np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps)
    out: NDArray[np.float64] = wide / size * weight
    return out


def rope(rows: Numbers, positions: Numbers, base: float, scale: float = 1.0) -> NDArray[np.float64]:
    """Rotate the two halves of each head of ``[rows, heads, head_dim]`` (RoPE)."""
    half = rows.shape[-1] // 2
    angles = positions[:, None, None] * scale * base ** (-np.arange(half) / half)
    first, second = rows[..., :half].astype(np.float64), rows[..., half:].astype(np.float64)
    sine, cosine = np.sin(angles), np.cos(angles)
    return np.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)


class DeltaInputs(NamedTuple):
    """The inputs of a gated delta net (a recurrent layer) with one key head, a row per token."""

    qkv: Numbers
    z: Numbers
    a: Numbers
    b: Numbers


class DeltaConstants(NamedTuple):
    """The weights of a gated delta net, without those of its projections."""

    conv: Numbers
    """The convolution's weights, ``[taps, (2 + heads) * dim]``, the oldest token's tap first."""
    a_log: Numbers
    dt_bias: Numbers
    norm: Numbers


def gated_delta(inputs: DeltaInputs, constants: DeltaConstants, eps: float) -> NDArray[np.float64]:
    """Return a gated delta net's output ``[tokens, heads * dim]`` from a zero state, by the
    formulas of arXiv 2412.06464. ``eps`` is the epsilon of the RMS norm."""
    inputs = DeltaInputs(*(array.astype(np.float64) for array in inputs))
    constants = DeltaConstants(*(array.astype(np.float64) for array in constants))
    heads, dim = len(constants.a_log), len(constants.norm)
    taps, width = constants.conv.shape
    rows = np.concatenate([np.zeros((taps - 1, width)), inputs.qkv])
    state, out = np.zeros((heads, dim, dim)), []
    for token, (a, b) in enumerate(zip(inputs.a, inputs.b, strict=True)):
        mixed = _silu((rows[token : token + taps] * constants.conv).sum(axis=0)).reshape(-1, dim)
        query, key, value = _unit(mixed[0]) / np.sqrt(dim), _unit(mixed[1]), mixed[2:]
        decay = np.exp(-np.exp(constants.a_log) * np.logaddexp(a + constants.dt_bias, 0))
        state = state * decay[:, None, None]
        change = (value - state @ key) / (1 + np.exp(-b))[:, None]
        state = state + change[:, :, None] * key
        out.append(state @ query)
    gated = rms_norm(np.stack(out), constants.norm, eps).reshape(inputs.z.shape)
    return gated * _silu(inputs.z)


def _silu(x: Numbers) -> NDArray[np.float64]:
    out: NDArray[np.float64] = x / (1 + np.exp(-x))
    return out


def _unit(x: Numbers) -> NDArray[np.float64]:
    out: NDArray[np.float64] = x / np.sqrt((x**2).sum() + UNIT_EPS)
    return out
