"""The arithmetic: a decode step's time, and a prompt's, of an engine on a chip.

A step's GPU time is what its products, attention, copies, dispatches and command buffers take, one
after the other: so it fits what peers have measured (measured.py). Between two steps comes what the
host does while nothing is queued.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from engine.config import EngineConfig
from engine.models.spec import Attention
from engine.models.tensors import Matrix, model_tensors
from engine.planning.arithmetic import GROUP_SIZE, Q4
from engine.planning.shape import ModelShape
from engine.token_budget import GPU_TILE_ROWS, TokenBudget
from kvcache.layout import KVFormat
from tests.metal.prediction.assumptions import Assumptions, Chip
from tests.metal.prediction.engines import Engine, Overlap

US = 1e-6
KIB = 1024
ELEMENT_BYTES = 2  # of K and V: bfloat16
# Of a matrix in 4 bits MLX sees words of codes, and a scale and a bias for each group.
ARRAY_NUMBERS = 4 / 32 + 2 / GROUP_SIZE
# What an M5's matrix units add to its lanes, in devices.py's rate.
MATRIX_UNITS = 4
# Rows of a tile, of MLX's products and of its attention of prompts (mlx#3863).
TILE_ROWS = GPU_TILE_ROWS
# mlx-lm: rows by which a cache grows, tokens of a prompt's chunk (cache.py, server.py).
GROWTH_ROWS = 256
MLX_LM_CHUNK = 2048
# MLX's attention takes two passes from so many keys on: Pro and larger; base.
TWO_PASS_KEYS = (1024, 4096)
# quire: configs' page, and the least of a prompt's chunk (engine/build.py).
PAGE_BYTES = 64 * KIB
LEAST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Work:
    """What a model's step consists of, as its spec has it."""

    layers: tuple[Attention, ...]
    products: tuple[tuple[Matrix, int], ...]
    """Of all layers, with how many are alike."""
    head: Matrix
    tokens_per_block: int

    @classmethod
    def of(cls, shape: ModelShape) -> "Work":
        spec = shape.spec
        tensors = model_tensors(spec, with_head=not spec.tied_embeddings)
        alike = Counter(
            Matrix("", its.outputs, its.inputs)
            for layer in tensors.layers
            for product in layer.products
            for its in product
        )
        rows = spec.kv_shape(KVFormat.BFLOAT16).specs
        return cls(
            layers=spec.attentions,
            products=tuple(alike.items()),
            head=tensors.head or tensors.embedding,
            tokens_per_block=max(1, PAGE_BYTES // max(its.row_bytes for its in rows)),
        )

    def kv_bytes(self, context: int) -> int:
        """Of K and V that a token at that position sees."""
        return sum(layer_bytes(its, context) for its in self.layers)

    @property
    def array_numbers(self) -> float:
        """Of all products, in millions (2**20) as MLX counts them."""
        numbers = sum(count * its.outputs * its.inputs for its, count in self.products)
        return numbers * ARRAY_NUMBERS / 2**20


def seen(attention: Attention, context: int) -> int:
    """Tokens that a token sees."""
    return context if attention.window is None else min(context, attention.window)


def layer_bytes(attention: Attention, context: int) -> int:
    """Of K and V of one layer."""
    row = 2 * attention.kv_heads * attention.head_dim * ELEMENT_BYTES
    return seen(attention, context) * row


@dataclass(frozen=True, slots=True)
class Machine:
    """A chip and what is assumed of it."""

    chip: Chip
    given: Assumptions

    @property
    def bytes_per_s(self) -> float:
        """Of large reads and writes."""
        return self.chip.device.bytes_per_s * self.given.read_share.value

    def vector_rows(self, matrix: Matrix) -> int:
        """From so many rows on MLX takes its kernel of tiles: mlx/backend/metal/quantized.cpp."""
        largest = max(matrix.inputs, matrix.outputs)
        small, medium, large = self._vector_limits()
        return small if largest <= 2048 else medium if largest <= 4096 else large

    def _vector_limits(self) -> tuple[int, int, int]:
        if self.chip.is_ultra:
            return 32, 18, 12
        if self.chip.generation >= 5:
            return 33, 25, 13
        return (13, 15, 13) if self.chip.generation >= 3 else (14, 10, 6)

    def product_s(self, matrix: Matrix, rows: int) -> float:
        """Rows times a matrix in 4 bits: the longer of reading it and computing."""
        numbers = matrix.inputs * matrix.outputs
        peak = self.chip.device.ops_per_s
        if rows < self.vector_rows(matrix):
            lanes = peak / (MATRIX_UNITS if self.chip.generation >= 5 else 1)
            computing = 2 * numbers * rows / (lanes * self.given.vector_share.value)
        else:
            padded = ceil(rows / TILE_ROWS) * TILE_ROWS
            computing = 2 * numbers * padded / (peak * self.given.matrix_share.value)
        return max(Q4.bytes_of(numbers) / self.bytes_per_s, computing)

    def products_s(self, work: Work, rows: int) -> float:
        """All products of all layers."""
        return sum(count * self.product_s(its, rows) for its, count in work.products)

    def attention_s(self, engine: Engine, work: Work, context: int, sequences: int) -> float:
        """Decode attention of all layers."""
        total = 0.0
        for its in work.layers:
            wide = its.heads <= 4 * its.kv_heads
            if engine.has_own_attention:
                shares = self.given.own_wide_attention_share, self.given.own_shared_attention_share
            else:
                shares = self.given.wide_attention_share, self.given.shared_attention_share
            share = shares[0 if wide else 1].value
            total += sequences * layer_bytes(its, context) / (self.bytes_per_s * share)
        return total


@dataclass(frozen=True, slots=True)
class Step:
    """One step of decoding, in seconds."""

    gpu_s: float
    period_s: float
    """From one step's beginning to the next one's."""


def dispatches(engine: Engine, chip: Chip, work: Work, context: int) -> tuple[int, int]:
    """Of a step: those that wait for one before them, and others."""
    dependent = engine.dependent * len(work.layers) + engine.step_dispatches
    if not engine.has_own_attention:
        for its in work.layers:
            keys = seen(its, context)
            least, least_base = TWO_PASS_KEYS
            grouped = its.kv_heads < its.heads and keys >= least_base
            dependent += grouped or (keys >= least and not chip.is_base)
    return dependent, engine.independent * len(work.layers)


def buffers(engine: Engine, chip: Chip, work: Work, operations: int) -> int:
    """Command buffers of a step, and one more for its end."""
    limits = engine.buffer_limits(chip)
    most = max(operations / (limits.operations + 1), work.array_numbers / (limits.numbers + 1))
    return ceil(most) + 1


def launches_s(engine: Engine, on: Machine, work: Work, context: int) -> float:
    """Of all dispatches and command buffers of a step."""
    dependent, independent = dispatches(engine, on.chip, work, context)
    number = buffers(engine, on.chip, work, dependent + independent)
    given = on.given
    weighed = dependent + independent * given.independent_share.value
    return (weighed * given.dispatch_us.value + number * given.buffer_us.value) * US


def decode_step(
    engine: Engine, on: Machine, work: Work, context: int, sequences: int, longest: int = 0
) -> Step:
    """A step of so many sequences of so many tokens. longest: of the sequences, where not all are
    alike: mlx-lm's cache has that many rows for each."""
    gpu_s = on.products_s(work, sequences) + on.product_s(work.head, sequences)
    gpu_s += on.attention_s(engine, work, context, sequences)
    gpu_s += launches_s(engine, on, work, context)
    if engine.is_mlx_lm:
        grown = 2 * sequences * work.kv_bytes(max(context, longest))  # read and written
        gpu_s += grown / GROWTH_ROWS / on.bytes_per_s
    else:
        mapping_s = sequences * on.chip.device.mapping_batch_s / work.tokens_per_block
        gpu_s += mapping_s * on.given.waited_mapping_share.value
    return Step(gpu_s, period_s(engine, on, work, context, sequences, gpu_s))


def period_s(
    engine: Engine, on: Machine, work: Work, context: int, sequences: int, gpu_s: float
) -> float:
    """GPU time and what the GPU waits for the host; or the host's time, where it is more."""
    given = on.given
    host = given.host_factor.value * US
    dependent, independent = dispatches(engine, on.chip, work, context)
    number = dependent + independent
    build = given.mlx_lm_build_us if engine.is_mlx_lm else given.own_build_us
    build_s = host * build.value * len(work.layers)
    traverse_s = host * given.traverse_us.value * number
    encode_s = host * given.encode_us.value * number
    first_s = encode_s / buffers(engine, on.chip, work, number)
    wake_s = host * given.wake_us.value
    if engine.is_mlx_lm:
        say_s = host * given.mlx_lm_token_us.value * sequences
    else:
        say_s = host * (given.own_step_us.value + given.own_token_us.value * sequences)
    front_s = host * given.front_token_us.value * sequences
    host_s = wake_s + say_s + front_s + build_s + traverse_s + encode_s
    if engine.overlap is Overlap.FIRST_LAYER:
        gap_s = wake_s + say_s + traverse_s + first_s - gpu_s / len(work.layers)
        return max(gpu_s + max(0.0, gap_s), host_s)
    if engine.overlap is Overlap.WHOLE_STEP:
        return max(gpu_s, host_s)
    # The first read waits for the step that is queued; then nothing is, and each further one is an
    # empty command buffer of its own.
    reads_s = sequences * given.round_trip_us.value * US
    gap_s = wake_s + reads_s + say_s + build_s + traverse_s + first_s
    series = given.reads_in_series.value
    return series * (gpu_s + gap_s) + (1 - series) * max(gpu_s, host_s + reads_s)


def decode_rate(
    engine: Engine, on: Machine, work: Work, context: int, sequences: int
) -> float:  # fmt: skip
    """Tokens per second of all sequences together."""
    return sequences / decode_step(engine, on, work, context, sequences).period_s


def turnover_s(on: Machine, work: Work, longest: int, sequences: int) -> float:
    """What mlx-lm copies when one sequence leaves a batch and another joins it: all rows, to leave
    one out; all rows, to put one behind them; and the two sequences themselves (``filter``,
    ``extend`` and ``extract`` of BatchKVCache). Each is read and written. quire copies nothing."""
    return 2 * (2 * sequences + 2) * work.kv_bytes(longest) / on.bytes_per_s


# --- prompts ------------------------------------------------------------------------------------


def chunk_s(engine: Engine, on: Machine, work: Work, start: int, count: int) -> float:
    """A prompt's tokens [start, start + count), alone on the device."""
    seconds = on.products_s(work, count) + launches_s(engine, on, work, start + count)
    peak = on.chip.device.ops_per_s * on.given.prompt_attention_share.value
    rows = ceil(count / TILE_ROWS) * TILE_ROWS
    for its in work.layers:
        last = seen(its, start + count)
        keys = last if engine.masks_with_array else last - min(count, last) / 2
        computing = 4 * its.heads * its.head_dim * rows * keys / peak
        if engine.masks_with_array:
            computing *= on.given.array_mask.value
        seconds += max(computing, layer_bytes(its, start + count) / on.bytes_per_s)
    if engine.is_mlx_lm:
        seconds += 2 * work.kv_bytes(start) / on.bytes_per_s  # moved to a larger cache
        # It waits for each chunk before it builds the next.
        waiting_us = on.given.wake_us.value + on.given.mlx_lm_build_us.value * len(work.layers)
        seconds += on.given.host_factor.value * waiting_us * US
    return seconds


def chunks(engine: Engine, on: Machine, work: Work, tokens: int) -> Iterator[tuple[int, float]]:
    """Each chunk's tokens and seconds. quire's follow its budget of tokens, mlx-lm's are alike."""
    config = EngineConfig(max_step_mask_s=inf, grammar_bytes=0)
    most = config.max_num_batched_tokens
    budget = TokenBudget(config.step_time_target_ms / 1e3, LEAST_CHUNK, most, most, TILE_ROWS)
    start = 0
    while start < tokens:
        room = MLX_LM_CHUNK if engine.is_mlx_lm else budget.room(decoding=False)
        count = min(room, tokens - start)
        seconds = chunk_s(engine, on, work, start, count)
        budget.observe(count, seconds, decoding=False)
        yield count, seconds
        start += count


def prompt_rate(engine: Engine, on: Machine, work: Work, tokens: int) -> float:
    """Tokens of one prompt per second, alone, to its first token."""
    seconds = sum(its for _, its in chunks(engine, on, work, tokens)) + on.product_s(work.head, 1)
    if engine.is_mlx_lm:  # its last token is a step of decoding
        seconds += decode_step(engine, on, work, tokens, 1).period_s
    return tokens / seconds
