"""What the kernels compute, in float64."""

import numpy as np
from numpy.typing import NDArray

from tests.metal.kernels.formats import Floats

Whole = NDArray[np.int_]
Single = NDArray[np.float32]


def attention(
    queries: Floats,
    keys: Floats,
    values: Floats,
    scale: float,
    softcap: float = 0.0,
    sinks: Single | None = None,
) -> Floats:
    """Of one row. queries, result: [heads][D]; keys, values: [positions][kv_heads][D]; sinks:
    [heads]."""
    group = queries.shape[0] // keys.shape[1]
    scores = np.einsum("hd,nhd->hn", queries, keys.repeat(group, axis=1)) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if sinks is not None:
        scores = np.concatenate([scores, sinks.astype(np.float64)[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = (weights / weights.sum(axis=1, keepdims=True))[:, : len(keys)]
    mixed: Floats = np.einsum("hn,nhd->hd", weights, values.repeat(group, axis=1))
    return mixed


def normalised(rows: Floats, weight: Floats, eps: float) -> Floats:
    """RMS norm over the last axis."""
    scaled: Floats = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps) * weight
    return scaled


def angles(positions: Whole, frequencies: Single) -> Floats:
    """RoPE's angles as float32 gives them, [positions][head_dim / 2].

    Every implementation computes them so; at large positions float64 would give others.
    """
    turned: Floats = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    return turned


def rotated(rows: Floats, turned: Floats) -> Floats:
    """rows: [rows][heads][D]; dimension i turns together with i + D / 2, by turned[row][i]."""
    low, high = np.split(rows, 2, axis=-1)
    cosine, sine = np.cos(turned)[:, None], np.sin(turned)[:, None]
    return np.concatenate([low * cosine - high * sine, low * sine + high * cosine], axis=-1)


def gated(gate: Floats, up: Floats, kind: int) -> Floats:
    """What the gate of that number (arguments.h) makes of up."""
    if kind == 1:
        half = (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        mlp: Floats = gate / (1.0 + np.exp(-2.0 * half)) * up  # gate / 2 * (1 + tanh(half)) * up
    elif kind == 2:
        gate = np.minimum(gate, 7.0)
        mlp = gate / (1.0 + np.exp(-1.702 * gate)) * (np.clip(up, -7.0, 7.0) + 1.0)
    else:
        mlp = gate / (1.0 + np.exp(-gate)) * up
    return mlp
