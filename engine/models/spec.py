"""What a model is, as data: an embedding, layers and a head.

``families`` makes a spec of ``config.json``; names, shapes and sizes of tensors, the forward, the
memory of K and V and the cost of a step follow from it.
"""

from dataclasses import dataclass

from kvcache.layout import KVFormat, KVShape, KVSpec


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: dimensions i and ``i + head_dim / 2`` of a head turn together, by
    ``position * frequencies(head_dim)[i]`` radians."""

    base: float
    scale: float = 1.0
    """Of positions."""
    periods: tuple[float, ...] | None = None
    """Positions per radian of each pair, instead of what base and scale make."""
    magnitude: float = 1.0
    """What heads are multiplied by."""

    def frequencies(self, head_dim: int) -> list[float]:
        """Return the radians per position of each pair of dimensions."""
        if self.periods is not None:
            return [1.0 / period for period in self.periods]
        pairs = head_dim // 2
        return [float(self.scale * self.base ** (-pair / pairs)) for pair in range(pairs)]


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a layer; ``heads / kv_heads`` queries share a key and a value."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: bool
    """Whether queries and keys take an RMS norm over head_dim before they turn."""
    qkv_bias: bool
    """Whether queries, keys and values have biases."""
    window: int | None = None
    """How many tokens a token sees, itself included; None: all before it."""

    @property
    def scale(self) -> float:
        """Return what queries times keys are multiplied by."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """``down(silu(gate(x)) * up(x))``, the same matrices for every token."""

    inner_size: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """``x += attention(norm(x))``, then ``x += mlp(norm(x))``."""

    attention: Attention
    mlp: DenseMlp


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder."""

    family: str
    """As people write it."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool
    """Whether the embedding is the head as well."""
    norm_eps: float
    """Of all RMS norms."""
    max_position_embeddings: int

    @property
    def num_layers(self) -> int:
        """Return how many layers there are."""
        return len(self.layers)

    def kv_shape(self, format: KVFormat) -> KVShape:
        """Return what is kept of every token, as numbers of that format."""
        layers = (its.attention for its in self.layers)
        return KVShape(tuple(KVSpec(its.kv_heads, its.head_dim, format) for its in layers))
