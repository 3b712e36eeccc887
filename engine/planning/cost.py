"""Computes the time of a model's step on a device: the sum of the times of products, attention, and
the starts of a GPU's commands. Meanwhile the host prepares the next step, which takes less time."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from engine.models.mlx_ops import FEW_ROWS, LEAST_PAIRS_PER_EXPERT, has_few_pairs
from engine.models.spec import Attention, Experts, LayerSpec, ModelSpec
from engine.models.tensors import AttentionTensors, model_tensors
from engine.planning.devices import Device
from engine.planning.memory import VECTOR_BYTES
from kvcache.layout import KVShape

# The GPU's kernel for decoding reads K and V once for this many query heads (kMostTileHeads).
TILE_HEADS = 8
# Parts of the rate at which weights are read. K and V: other kernels reach 0.81 to 0.87 (mlx#4077).
# Experts: 542 of 655 GB/s for four tokens on an M3 Ultra (mlx#4509).
KV_READ_SHARE, EXPERT_READ_SHARE = 0.85, 0.83
ATTENTION_SHARE = 0.55  # of the operations: an estimate, for a prompt
# A prompt's token in a recurrent layer: 3.93 ms for 2048 of them, M3 Ultra (Rapid-MLX#2144).
RECURRENCE_S = 1.9e-6
# A command that waits for none takes this part of another's time: 0.5 of 1.3 us (infr#14).
BESIDE_SHARE = 0.4
# Numbers of commands: those that wait for the one before them, and others, which run beside it.
# tests/metal/graph counts them in a step's graph.
ENDS = 10, 0  # embedding, final norm, head, sampling, and what ends a step
ROTATION = 4, 0  # of an input that several matrices may share
# With up to FEW_ROWS rows, whose products share commands, and with more. Models with rotated inputs
# are packed in 2 bits, which MLX multiplies with few rows as well.
ATTENTION, OUTPUT_GATE, QKV_BIAS = ((6, 0), (7, 2)), ((1, 2), (1, 2)), ((0, 0), (1, 2))
DELTA_NET, DENSE = ((6, 0), (7, 3)), ((3, 0), (5, 1))
MIXTURE = 6, 0  # by quire's own kernels, with or without a shared expert
MANY_PAIRS, SHARED_EXPERT = (20, 7), (2, 6)  # by MLX's


@dataclass(frozen=True, slots=True)
class CostModel:
    """Computes how long a step of one model takes on one device."""

    device: Device
    spec: ModelSpec
    kv: KVShape
    bytes_per_number: float
    """The mean over all matrices, in memory."""
    dense_numbers: int
    """The count of numbers in matrices that multiply every token."""
    expert_numbers: dict[Experts, int]
    """The count of numbers in one expert of each layer, by mixture."""
    rotations: int
    """The number of products whose input is rotated."""

    @classmethod
    def of(cls, device: Device, spec: ModelSpec, weights_bytes: int, kv: KVShape) -> "CostModel":
        """``weights_bytes`` is the size of all weights in memory."""
        whole = model_tensors(spec, with_head=not spec.tied_embeddings)
        spec = replace(spec, draft=None)
        tensors = model_tensors(spec, with_head=not spec.tied_embeddings)
        layers = Counter(layer.mlp for layer in spec.layers if isinstance(layer.mlp, Experts))
        one = {mlp: 3 * n * mlp.inner_size * spec.hidden_size for mlp, n in layers.items()}
        numbers = tensors.count(2)
        dense = numbers - sum(mlp.experts * size for mlp, size in one.items())
        dense -= spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
        if whole.draft is not None:  # other matrices multiply only the tokens that it drafts
            assert isinstance(whole.draft.layer.mixer, AttentionTensors)
            kept = (whole.draft.join, *whole.draft.layer.mixer.queries_keys_values)
            dense += sum(each.outputs * each.inputs for each in kept)
        per_number = (weights_bytes - VECTOR_BYTES * whole.count(1)) / whole.count(2)
        ends = [(matrix,) for matrix in (tensors.embedding, tensors.head) if matrix is not None]
        inputs = [*ends, *(each for layer in tensors.layers for each in layer.products)]
        rotations = sum(any(tensors.blocks.get(m.name) for m in each) for each in inputs)
        return cls(device, spec, kv, per_number, dense, one, rotations)

    def step_seconds(self, plan: Sequence[tuple[int, int]]) -> float:
        """Return a step's time. ``plan`` has ``(start, count)`` of each sequence's new tokens."""
        tokens = sum(count for _, count in plan)
        return (
            self.device.rates.step_s
            + self._commands_s(tokens)
            + self._dense_s(self.dense_numbers, tokens)
            + self._dense_s(self.spec.vocab_size * self.spec.hidden_size, len(plan))
            + sum(self._experts_s(mixture, tokens) for mixture in self.expert_numbers)
            + sum(self._mixers_s(start, count) for start, count in plan)
        )

    def prompt_tokens(self, seconds: float, maximum: int, start: int = 0) -> int:
        """Return how many tokens of a prompt, from ``start`` on, a step of ``seconds`` computes:
        whole tiles, one at least, and ``maximum`` tokens at most."""
        tile = self.device.rates.tile_rows
        more = range(2 * tile, maximum + 1, tile)
        tiles = 1 + bisect_right(more, seconds, key=lambda n: self.step_seconds([(start, n)]))
        return min(tiles * tile, maximum)

    def commands(self, tokens: int) -> tuple[int, int]:
        """Return the numbers of commands of a step that wait for the one before them, and of other
        commands, with a sequence that is longer than 2 * SHORT_SPLIT_TOKENS."""
        own = tokens <= FEW_ROWS and not self.rotations
        parts = [part for layer in self.spec.layers for part in _commands(layer, tokens, own)]
        waiting, beside = zip(ENDS, *[ROTATION] * self.rotations, *parts, strict=True)
        return sum(waiting), sum(beside)

    def _product_s(self, numbers: float, rows: float, share: float, read_share: float = 1) -> float:
        """Return the time to multiply rows by matrices, at these parts of the device's rates."""
        device = self.device
        read = numbers * self.bytes_per_number / (device.rates.read_share * read_share)
        return max(read / device.bytes_per_s, 2 * numbers * rows / share / device.ops_per_s)

    def _dense_s(self, numbers: float, rows: int) -> float:
        rates = self.device.rates
        if rows <= rates.few_rows:
            return self._product_s(numbers, rows, rates.vector_share)
        padded = ceil(rows / rates.tile_rows) * rates.tile_rows
        return self._product_s(numbers, padded, rates.tile_share)

    def _experts_s(self, mixture: Experts, tokens: int) -> float:
        rates, distinct = self.device.rates, mixture.distinct(tokens)
        pairs, numbers = tokens * mixture.chosen, distinct * self.expert_numbers[mixture]
        rows = pairs / distinct
        if pairs < LEAST_PAIRS_PER_EXPERT * mixture.experts:
            read_share = EXPERT_READ_SHARE if tokens > 1 else rates.expert_read_share
            return self._product_s(numbers, rows, rates.vector_share, read_share)
        # The kernel multiplies half a tile more for each expert.
        return self._product_s(numbers, rows + rates.tile_rows // 2, rates.tile_share)

    def _mixers_s(self, start: int, count: int) -> float:
        """Return the time of one sequence's attention and recurrences, without their products."""
        device, spec = self.device, self.spec
        ops = kv_bytes = 0.0
        # A draft head's layer, the last of the cache, attends only when it drafts.
        for each, rows in zip(spec.attentions, self.kv.layers, strict=False):
            seen = inf if each.window is None else each.window
            mean = min(start + (count + 1) / 2, seen)
            ops += 4 * each.heads * each.head_dim * count * mean
            tiles = ceil(each.heads / each.kv_heads / TILE_HEADS)
            kv_bytes += 2 * rows.row_bytes * min(start + count, seen + count) * tiles
        states = 2 * sum(state.state_bytes for state in self.kv.states)
        read = (kv_bytes / KV_READ_SHARE + states) / device.rates.read_share
        attention_s = max(read / device.bytes_per_s, ops / ATTENTION_SHARE / device.ops_per_s)
        return attention_s + RECURRENCE_S * len(spec.recurrences) * (count - 1)

    def _commands_s(self, tokens: int) -> float:
        rates, (waiting, beside) = self.device.rates, self.commands(tokens)
        buffers = ceil((waiting + beside) / rates.buffer_commands)
        return (waiting + BESIDE_SHARE * beside) * rates.command_s + buffers * rates.buffer_s


def _commands(layer: LayerSpec, tokens: int, own: bool) -> Iterator[tuple[int, int]]:
    """``own`` is True if quire's own kernels multiply."""
    mixer, mlp, many = layer.mixer, layer.mlp, not own
    if isinstance(mixer, Attention):
        yield ATTENTION[many]
        yield from [OUTPUT_GATE[many]] * mixer.output_gate + [QKV_BIAS[many]] * mixer.qkv_bias
    else:
        yield DELTA_NET[many]
    if isinstance(mlp, Experts) and has_few_pairs(mlp, tokens):
        yield MIXTURE
    elif isinstance(mlp, Experts):
        yield from [MANY_PAIRS, *[SHARED_EXPERT] * (mlp.shared_inner_size is not None)]
    else:
        yield DENSE[many]
