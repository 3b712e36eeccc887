"""How long a step takes: a roofline, the longer of moving bytes and doing operations."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.models.spec import Experts
from engine.planning.arithmetic import VECTOR_BYTES, Packing, kv_bytes_per_token, kv_shape
from engine.planning.devices import Device
from engine.planning.shape import ModelShape

# Of a number of a state and a token: it decays, is multiplied by the key and by the query, and the
# key's part is added to it.
STATE_OPS = 7


@dataclass(frozen=True, slots=True)
class CostModel:
    """Bytes and operations of a step of one model on one device.

    A step reads the weights once, however many tokens it computes, but of experts only those that
    its tokens choose, as if at random; the K and V of every sequence up to its last token; and its
    states, which it writes as well.
    Activations stay in caches and are not counted.
    """

    device: Device
    weights_bytes: int
    """Read by every step: of all but experts."""
    kv_bytes_per_token: int
    ops_per_token: int
    """Of the matrices that every token passes."""
    ops_per_row: int
    """Of the logits, which only an entry's last token needs."""
    ops_per_pair: int
    """Of attention, for each pair of a token and one that it sees."""
    mixtures: tuple[tuple[Experts, int], ...] = ()
    """Of each layer that has one, and the bytes of one expert."""
    state_bytes: int = 0
    """Of a sequence's states, which a step reads and writes."""

    @classmethod
    def of(cls, shape: ModelShape, device: Device, weights: Packing, kv: Packing) -> "CostModel":
        """Return the cost of a model whose weights and cache are packed like that."""
        spec = shape.spec
        embedding = spec.vocab_size * spec.hidden_size
        layers = shape.matrix_numbers - embedding * (1 if spec.tied_embeddings else 2)
        mixtures = [its.mlp for its in spec.layers if isinstance(its.mlp, Experts)]
        one = [3 * its.inner_size * spec.hidden_size for its in mixtures]
        experts = sum(its.experts * size for its, size in zip(mixtures, one, strict=True))
        active = sum(its.chosen * size for its, size in zip(mixtures, one, strict=True))
        return cls(
            device=device,
            # Of an embedding that is not the output matrix as well, a step reads a few rows.
            weights_bytes=weights.bytes_of(layers - experts + embedding)
            + VECTOR_BYTES * shape.vector_numbers,
            kv_bytes_per_token=kv_bytes_per_token(shape, kv),
            ops_per_token=2 * (layers - experts + active)
            + sum(STATE_OPS * its.values_width * its.key_dim for its in spec.recurrences),
            ops_per_row=2 * embedding,
            ops_per_pair=sum(4 * its.heads * its.head_dim for its in spec.attentions),
            mixtures=tuple(
                (its, weights.bytes_of(size)) for its, size in zip(mixtures, one, strict=True)
            ),
            state_bytes=sum(its.state_bytes for its in kv_shape(shape).states),
        )

    def weights_read(self, tokens: int) -> float:
        """Return the bytes of weights that a step of so many tokens reads."""
        return self.weights_bytes + sum(its.distinct(tokens) * size for its, size in self.mixtures)

    def step_seconds(self, plan: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a step that computes tokens [start, start + count) of each
        sequence."""
        tokens = sum(count for _, count in plan)
        # Everything up to the last token is read, and the new tokens are written before that.
        touched = sum(start + 2 * count for start, count in plan)
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in plan)
        bytes_moved = self.weights_read(tokens) + self.kv_bytes_per_token * touched
        bytes_moved += 2 * self.state_bytes * len(plan)
        ops = self.ops_per_token * tokens + self.ops_per_row * len(plan) + self.ops_per_pair * pairs
        device = self.device
        return device.step_overhead_s + max(
            bytes_moved / device.bytes_per_s, ops / device.ops_per_s
        )
