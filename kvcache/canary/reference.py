"""What the kernels should say, in float64."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating]
MOST_ROWS = 40


def attention(
    queries: Numbers, keys: Numbers, values: Numbers, places: NDArray[np.intp], scale: float
) -> NDArray[np.float64]:
    """Causal softmax attention: row i of ``[rows, query_heads, head_dim]`` sees positions up to
    ``places[i]`` of ``[tokens, kv_heads, head_dim]``."""
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


def some_of(count: int) -> NDArray[np.intp]:
    """Rows of a chunk that are worth looking at, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, MOST_ROWS).astype(np.intp))


def normed(rows: Numbers, weight: Numbers, eps: float) -> NDArray[np.float64]:
    """RMS norm over the last axis."""
    wide = rows.astype(np.float64)
    size = np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps)
    out: NDArray[np.float64] = wide / size * weight
    return out


def rotated(
    rows: Numbers, positions: Numbers, base: float, scale: float = 1.0
) -> NDArray[np.float64]:
    """RoPE over the halves of ``[rows, heads, head_dim]``."""
    half = rows.shape[-1] // 2
    angles = positions[:, None, None] * scale * base ** (-np.arange(half) / half)
    first, second = rows[..., :half].astype(np.float64), rows[..., half:].astype(np.float64)
    sine, cosine = np.sin(angles), np.cos(angles)
    return np.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)
