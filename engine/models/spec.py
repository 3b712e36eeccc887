"""A model's structure as data: embedding, layers and head, made from ``config.json``."""

from dataclasses import dataclass, replace
from enum import Enum

from kvcache.layout import KVFormat, KVShape, KVSpec, StateSpec


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (RoPE). Dimensions i and i + dims / 2 of a head rotate as a pair,
    by ``position * frequencies(head_dim)[i]`` radians."""

    base: float
    scale: float = 1.0
    """The factor by which positions are multiplied."""
    periods: tuple[float, ...] | None = None
    """The positions per radian of each pair of dimensions, used instead of base and scale."""
    magnitude: float = 1.0
    """The factor by which the rotated dimensions are multiplied."""
    dims: int | None = None
    """The number of leading dimensions of a head that rotate; None means all dimensions."""

    def frequencies(self, head_dim: int) -> list[float]:
        if self.periods is not None:
            return [1.0 / period for period in self.periods]
        pairs = (self.dims or head_dim) // 2
        return [float(self.scale * self.base ** (-pair / pairs)) for pair in range(pairs)]


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of a layer. ``heads / kv_heads`` query heads share one head of K and V."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: bool
    """Whether queries and keys have an RMS norm over head_dim before RoPE."""
    qkv_bias: bool
    """Whether queries, keys and values have biases."""
    window: int | None = None
    """The number of newest tokens that a token attends to, itself included; None means all."""
    output_gate: bool = False
    """Whether each head's output is multiplied by the sigmoid of a gate of the same width."""
    query_scalar: float | None = None
    """The number whose inverse root is the scale of scores; None means head_dim."""
    softcap: float = 0.0
    """A score s becomes ``softcap * tanh(s / softcap)``, unless this is 0."""
    output_bias: bool = False
    sinks: bool = False
    """Whether each query head has a learnt logit (sink), of a key without a value."""

    @property
    def scale(self) -> float:
        return float((self.query_scalar or self.head_dim) ** -0.5)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """A recurrence with a state of fixed size, after a short convolution (arXiv 2412.06464). Each
    query and key head serves ``value_heads / key_heads`` value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """The number of tokens that the convolution reads: the current token and those before it."""

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Return the widths of a token's four projections: queries with keys and values, output
        gate, beta, and decay."""
        return self.conv_width, self.values_width, self.value_heads, self.value_heads

    @property
    def values_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.values_width


Mixer = Attention | GatedDeltaNet


class Gate(Enum):
    """What an MLP makes of its gate and its up-projection (metal_ext.gated_mlp)."""

    SILU = "silu"
    GELU = "gelu_tanh"
    CLAMPED_SILU = "clamped_silu"


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """The MLP ``down(silu(gate(x)) * up(x))``, or with another gate."""

    inner_size: int
    gate: Gate = Gate.SILU

    def numbers_per_token(self, hidden_size: int) -> int:
        """Return the count of intermediate numbers for one token: gate, up-projection, product."""
        return 3 * self.inner_size


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture ``sum(share * expert(x))`` of dense MLPs (experts). The softmax of the router's
    output gives the shares. The sum is over the experts with the largest shares."""

    experts: int
    chosen: int
    """The number of experts that compute each token."""
    inner_size: int
    normalised: bool
    """Whether the chosen experts' shares are divided by their sum."""
    shared_inner_size: int | None = None
    """The inner size of a shared expert, which adds ``sigmoid(gate(x)) * shared(x)``."""
    gate: Gate = Gate.SILU
    biases: bool = False
    """Whether the router and the experts' linear layers have biases."""

    def numbers_per_token(self, hidden_size: int) -> int:
        """Return the count of intermediate numbers for one token, with those of a shared expert."""
        chosen = self.chosen * (3 * self.inner_size + 2 * hidden_size)
        return chosen + 2 * self.experts + 3 * (self.shared_inner_size or 0)

    def distinct(self, tokens: int) -> float:
        return self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** tokens)


Mlp = DenseMlp | Experts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer: ``x += mixer(norm(x))``, then ``x += mlp(norm(x))``. With ``post_norms``,
    the outputs of mixer and MLP have norms of their own before they are added."""

    mixer: Mixer
    mlp: Mlp
    post_norms: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The structure of a decoder-only language model."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool
    """Whether the embedding is also the output head."""
    norm_eps: float
    max_position_embeddings: int
    norm_offset: float = 0.0
    """The number that is added to the stored weights of all norms."""
    embedding_scale: float = 1.0
    """The factor of embeddings, which the output head does not have."""
    logit_softcap: float = 0.0
    """A logit x becomes ``softcap * tanh(x / softcap)``, unless this is 0."""
    blocks: tuple[tuple[str, int], ...] = ()
    """For a model with rotated inputs, pairs of a quantized layer's name and the number of inputs
    that a block of the rotation has, or 0. Other layers are plain. A GPU computes in float16."""
    unread: tuple[tuple[str, str], ...] = ()
    """Pairs of a name prefix and a purpose, for stored tensors that serving does not read."""
    draft: LayerSpec | None = None
    """The layer of the head that drafts tokens (multi-token prediction), if the model has one."""

    def with_draft_head(self) -> "ModelSpec":
        """Return the model with a draft head. Its layer is like the last one, and attends to all
        tokens as the last layer without a window does."""
        mixer = min(reversed(self.attentions), key=lambda each: each.window or 0)
        return replace(self, draft=replace(self.layers[-1], mixer=mixer))

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """Return the layers, and after them the draft head's layer."""
        return self.layers if self.draft is None else (*self.layers, self.draft)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(layer.mixer for layer in self.all_layers if isinstance(layer.mixer, Attention))

    @property
    def recurrences(self) -> tuple[GatedDeltaNet, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet))

    @property
    def places(self) -> list[int]:
        """Return the index of each of all layers among those with the same type of mixer."""
        kinds = [type(layer.mixer) for layer in self.all_layers]
        return [kinds[:number].count(kind) for number, kind in enumerate(kinds)]

    def kv_shape(self, format: KVFormat, computed: KVFormat = KVFormat.FLOAT32) -> KVShape:
        """Return the shape of a sequence's cache. K and V have the type ``format``. The inputs that
        convolutions keep have the type ``computed``."""
        return KVShape(
            tuple(
                KVSpec(each.kv_heads, each.head_dim, format, each.window or 0)
                for each in self.attentions
            ),
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
            0 if self.draft is None else self.hidden_size,
        )
