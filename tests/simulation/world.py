"""The world of a seed: an engine, its machine and its traffic, as one value.

What is drawn here every seed has: sizes, speeds and times. All else is a switch (switches.py).
"""

import math
from dataclasses import dataclass, replace
from random import Random

from engine.machine import PressureLevel
from engine.types import EngineLimits, PrefixSalt
from kvcache.layout import KVFormat, KVLayout, KVShape, KVSpec, grouped_layout
from tests.kvcache.strict_memory import Manners

VOCAB = 997
NOT_CUT = 1024
"""Tokens of a step that hold any prompt whole."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything but the draws that depend on events. The defaults are a machine without a fault,
    and an engine for one client at a time."""

    # The engine.
    layout: KVLayout
    max_model_len: int
    heaps: int
    odd_part: float = 0.0
    """Of a heap, which the budget has as well."""
    max_num_seqs: int = 1
    max_num_batched_tokens: int = NOT_CUT
    min_budget_tokens: int = NOT_CUT
    step_target_s: float = 0.1
    max_step_mask_s: float = math.inf
    overlap: bool = False
    """Whether steps are begun before the one in flight is read."""
    mistaken_drafts: float | None = None
    """The share of drafts that are drawn by chance; None: there are no drafts."""
    shares_prefixes: bool = False
    max_sharers: int = 1000
    free_slack_bytes: int = 0
    idle_release_s: float = 1.0
    prefix_keep_s: float = 1000.0
    num_slots: int = 0
    """Slots of a model with recurrent layers; 0: it has none."""
    # The memory.
    shares_blocks: bool = True
    maps_while_running: bool = True
    slowness: float = 0.0
    manners: Manners = Manners.BLOCKS
    refusal_rate: float = 0.0
    longest_storm: int = 1
    most_refusals: int = 0
    stuck_rate: float = 0.0
    mapping_limit: int | None = None
    heap_limit: int | None = None
    pressure: PressureLevel = PressureLevel.NORMAL
    """The memory pressure at the beginning."""
    pressure_rate: float = 0.0
    """The rate of changes of the memory pressure."""
    limit_rate: float = 0.0
    """The rate at which other models take memory, or give it back."""
    disk_fault_rate: float | None = None
    """The share of calls to the disk that fail; None: no prefix is kept there."""
    # The device.
    step_s: float = 0.001
    token_s: float = 0.0001
    longest_lag: int = 0
    """Ticks until a step has completed, at most."""
    failure_rate: float = 0.0
    """The share of steps that fail."""
    failures_end_engine: bool = False
    """Whether a second step may fail within a minute. Else a failure takes a minute."""
    bad_row_rate: float = 0.0
    """The share of sampled rows that are not finite."""
    model_is_broken: bool = False
    """Whether no row is ever finite."""
    # The clients. A rate is a share of requests.
    arrivals: tuple[float, ...] = (0.0,)
    """The times of requests, in seconds, rising."""
    longest_prompt: int = 1
    longest_answer: int = 1
    system_prompts: tuple[tuple[int, ...], ...] = ((),)
    salts: tuple[PrefixSalt, ...] = (PrefixSalt(),)
    turn_rate: float = 0.0
    repeat_rate: float = 0.0
    """Prompts that one of the last four had as well."""
    fork_rate: float = 0.0
    priority_rate: float = 0.0
    scoring_rate: float = 0.0
    pooling_rate: float = 0.0
    grammar_rate: float = 0.0
    penalty_rate: float = 0.0
    stop_id_rate: float = 0.0
    min_tokens_rate: float = 0.0
    abort_rate: float = 0.0
    stop_string_rate: float = 0.0
    """Answers whose reader leaves after some tokens: it has found a stop string."""
    slow_reader_rate: float = 0.0
    max_backlog: int = 8
    late_delivery_rate: float = 0.0

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self.max_model_len, self.max_num_seqs, VOCAB)

    @property
    def budget_bytes(self) -> int:
        return int((self.heaps + self.odd_part) * self.layout.heap_bytes)

    def heaps_for(self, sequences: float) -> int:
        """Return the number of heaps that hold this many sequences of full length."""
        group = self.layout.groups[0]
        return -(-int(group.blocks_per_buffer * sequences) // group.blocks_per_heap)


def draw_sizes(rng: Random) -> World:
    """Draw a small engine with room for one sequence, its speed, and short prompts in bursts."""
    max_model_len = rng.choice((rng.randint(2, 24), rng.randint(24, 64), rng.randint(64, 160)))
    layout = layout_of(
        1, rng.choice((1, 2, 3, 4, 4, 5, 8, 16)), max_model_len, rng.choice((1, 2, 3, 5, 8))
    )
    longest = max_model_len - 1
    systems = (draw_tokens(rng, rng.randint(0, longest * 2 // 3)) for _ in range(rng.randint(1, 3)))
    world = World(
        layout,
        max_model_len,
        heaps=0,
        odd_part=rng.random(),
        step_target_s=10 ** rng.uniform(-3, -1),
        step_s=10 ** rng.uniform(-4, -2),
        token_s=10 ** rng.uniform(-5, -3),
        arrivals=_draw_arrivals(rng),
        longest_prompt=max(1, round(longest * rng.choice((0.2, 0.4, 0.7, 1.0)))),
        longest_answer=rng.choice((1, 30, 60, 60)),
        system_prompts=tuple(systems),
    )
    return replace(world, heaps=world.heaps_for(1))


def layout_of(
    groups: int, tokens_per_block: int, max_tokens: int, heap_blocks: int, window: int = 0
) -> KVLayout:
    """Return a layout with a layer of each kind; the rows of the next kind are twice as wide, and
    its pages half as long where that can be. With ``window``, a further layer has one."""
    layers = [KVSpec(1, 2**kind, KVFormat.FLOAT32) for kind in range(groups)]
    layers += [KVSpec(1, 1, KVFormat.FLOAT32, window)] * (window > 0)
    shape = KVShape(tuple(layers))
    divisor = 2 if tokens_per_block % 2 == 0 else 1
    pages = {
        spec: spec.row_bytes * tokens_per_block // (1 if spec.head_dim == 1 else divisor)
        for spec in shape.specs
    }
    return grouped_layout(
        shape,
        pages,
        tokens_per_block=tokens_per_block,
        blocks_per_heap=heap_blocks,
        blocks_per_buffer=-(-max_tokens // tokens_per_block),
    )


def draw_tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(count))


def _draw_arrivals(rng: Random) -> tuple[float, ...]:
    """Draw a few bursts; between them the engine may fall idle, or a minute may pass."""
    now = 0.0
    arrivals = []
    for _ in range(rng.randint(1, 3)):
        spread = 10 ** rng.uniform(-4, -1.5)
        for _ in range(rng.randint(2, 9)):
            now += rng.expovariate(1 / spread)
            arrivals.append(now)
        now += rng.choice((0.01, 0.3, 5.0, 70.0))
    return tuple(arrivals)
