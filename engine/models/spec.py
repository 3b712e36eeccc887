"""A model as data: an embedding, layers and a head.

``families`` makes a spec of ``config.json``; names, shapes and sizes of tensors, the forward, the
memory of K and V and the cost of a step follow from it.
"""

from dataclasses import dataclass

from kvcache.layout import KVFormat, KVShape, KVSpec, StateSpec


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: of the dimensions of a head that turn, i and the one half of them behind it
    turn together, by ``position * frequencies(head_dim)[i]`` radians."""

    base: float
    scale: float = 1.0
    """A factor of positions."""
    periods: tuple[float, ...] | None = None
    """Positions per radian of each pair; they replace base and scale."""
    magnitude: float = 1.0
    """A factor of the rotated heads."""
    dims: int | None = None
    """How many dimensions of a head turn, the first; None: all."""

    def frequencies(self, head_dim: int) -> list[float]:
        """Return the radians per position of each pair of dimensions."""
        if self.periods is not None:
            return [1.0 / period for period in self.periods]
        pairs = (self.dims or head_dim) // 2
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
    output_gate: bool = False
    """Whether each head's output is multiplied by the sigmoid of a projection as wide."""

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """A recurrence with a state of constant size, behind a short convolution (arXiv 2412.06464);
    ``value_heads / key_heads`` value heads share queries and keys."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Rows that the convolution reads, the token's own included."""

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Return how many numbers of a token are projected: queries, keys and values; the output's
        gate; beta; the decay."""
        return self.conv_width, self.values_width, self.value_heads, self.value_heads

    @property
    def values_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.values_width


Mixer = Attention | GatedDeltaNet


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """``down(silu(gate(x)) * up(x))``, the same matrices for every token."""

    inner_size: int

    def numbers_per_token(self, hidden_size: int) -> int:
        """Return the numbers of a token inside of it at once: gates, up-projection and their
        product, without the hidden state."""
        return 3 * self.inner_size


@dataclass(frozen=True, slots=True)
class Experts:
    """``sum(weight * expert(x))`` over the ``chosen`` of ``experts`` dense MLPs whose share is the
    largest, with the softmax over all of them as shares."""

    experts: int
    chosen: int
    """For each token."""
    inner_size: int
    """The size of each expert."""
    normalised: bool
    """Whether the chosen ones' shares are divided by their sum."""
    shared_inner_size: int | None = None
    """The size of a dense MLP whose output, times ``sigmoid(gate(x))``, is added for every
    token."""

    def numbers_per_token(self, hidden_size: int) -> int:
        """Return the numbers of a token inside of it at once: each chosen expert's, its input and
        its output; two for each expert's share; the shared one's."""
        chosen = self.chosen * (3 * self.inner_size + 2 * hidden_size)
        return chosen + 2 * self.experts + 3 * (self.shared_inner_size or 0)

    def distinct(self, tokens: int) -> float:
        """Return how many experts that many tokens choose together, if each chooses at random."""
        return self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** tokens)


Mlp = DenseMlp | Experts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """``x += mixer(norm(x))``, then ``x += mlp(norm(x))``."""

    mixer: Mixer
    mlp: Mlp


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
    """For all RMS norms."""
    max_position_embeddings: int
    unread: tuple[tuple[str, str], ...] = ()
    """Prefixes of tensors that text does not need, each with its use."""

    @property
    def unread_prefixes(self) -> tuple[str, ...]:
        return tuple(start for start, _ in self.unread)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def recurrences(self) -> tuple[GatedDeltaNet, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet))

    @property
    def places(self) -> list[int]:
        """Return the number of each layer among those of its kind: those that attend, and those
        that keep a state."""
        kinds = [type(layer.mixer) for layer in self.layers]
        return [kinds[:number].count(kind) for number, kind in enumerate(kinds)]

    def kv_shape(self, format: KVFormat, computed: KVFormat = KVFormat.FLOAT32) -> KVShape:
        """Return the shape of a sequence's cache. format: of K and V. computed: the type of
        activations, and of convolutions' rows."""
        return KVShape(
            tuple(KVSpec(each.kv_heads, each.head_dim, format) for each in self.attentions),
            tuple(
                StateSpec(
                    net.key_heads,
                    net.value_heads,
                    net.key_dim,
                    net.value_dim,
                    net.taps - 1,
                    computed,
                )
                for net in self.recurrences
            ),
        )
