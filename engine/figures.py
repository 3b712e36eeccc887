"""Types for the engine's statistics: counters, histograms, and the memory that MLX holds."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvcache.stats import NO_DISK, DiskStats, KVStats, MissReason

STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SEQUENCE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUEUE_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
    *(100.0, 200.0, 500.0, 1000.0, 2000.0),
)

# The engine is drafting if drafts were checked within this time of steps.
DRAFTING_S = 1.0


class Drafting(IntEnum):
    """Whether the engine checks drafts."""

    OFF = 0
    """Drafts are switched off, or the device would compute other bits with them."""
    RESTING = 1
    """There are none at present, or they would not pay."""
    DRAFTING = 2


class HistogramCounts(NamedTuple):
    """The contents of a histogram at one moment."""

    bounds: tuple[float, ...]
    """The inclusive upper bounds of all buckets but the last, in ascending order."""
    counts: tuple[int, ...]
    """The number of values in each bucket; the last bucket has no bound."""
    total: float


class Histogram:
    """Counts values in buckets by size. Only one thread may call ``observe``."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def snapshot(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


def no_values(bounds: tuple[float, ...]) -> HistogramCounts:
    return Histogram(bounds).snapshot


class Distributions(NamedTuple):
    """Histograms of the engine's measurements since its start."""

    step_seconds: HistogramCounts = no_values(STEP_BOUNDS_S)
    step_sequences: HistogramCounts = no_values(SEQUENCE_BOUNDS)
    queue_seconds: HistogramCounts = no_values(QUEUE_BOUNDS_S)
    """Times from a request's submission to the start of the step that first computes its tokens."""


NOTHING_MEASURED = Distributions()


class StepMeter:
    """Collects the engine's measurements. Only the engine's thread may write."""

    def __init__(self) -> None:
        self.num_retired = 0
        """The number of steps that were read or have failed."""
        self.step_seconds = 0.0
        """The time of the newest step that was read."""
        histograms = [Histogram(each.bounds) for each in NOTHING_MEASURED]
        self._seconds, self._sequences, self._queue = histograms
        self._since_drafts_s = DRAFTING_S

    def step_ran(self, seconds: float, sequences: int, *, drafted: bool = False) -> None:
        self.step_seconds = seconds
        self._since_drafts_s = 0.0 if drafted else self._since_drafts_s + seconds
        self._seconds.observe(seconds)
        self._sequences.observe(sequences)

    def left_queue(self, seconds: float) -> None:
        self._queue.observe(seconds)

    @property
    def drafting(self) -> Drafting:
        return Drafting.DRAFTING if self._since_drafts_s < DRAFTING_S else Drafting.RESTING

    @property
    def snapshot(self) -> Distributions:
        return Distributions(self._seconds.snapshot, self._sequences.snapshot, self._queue.snapshot)


class MlxMemory(NamedTuple):
    """The memory that MLX holds, by its own count. All fields are 0 if MLX does not run."""

    active_bytes: int = 0
    """Bytes of arrays in use, weights included."""
    cache_bytes: int = 0
    """Freed bytes that MLX keeps for its next arrays."""
    peak_bytes: int = 0
    """The largest ``active_bytes`` so far."""


NO_MLX = MlxMemory()


@dataclass(slots=True)
class EngineStats:
    """The engine's counters since its start, and its state. The scheduler counts in one of its own;
    all others are snapshots that the engine's thread makes, and that any thread may read."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """The number of prompt tokens that were computed. A token computed twice counts twice."""
    generated_tokens: int = 0
    submitted_prompt_tokens: int = 0
    """The number of prompt tokens of all requests that began to run, cached tokens included."""
    cached_prompt_tokens: int = 0
    prefix_misses: Counter[MissReason] = field(default_factory=Counter)
    """For each reason, the number of requests whose cached prefix ended for this reason."""
    mapping_waits: int = 0
    """The number of steps that waited for memory to be mapped."""
    preemptions: int = 0
    failed_rows: int = 0
    """The number of sampled rows whose logits were not finite."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """The number of drafts that became tokens of an answer."""
    drafting: Drafting = Drafting.OFF
    wasted_rows: int = 0
    """The number of token rows computed for requests that had already ended."""
    token_budget: int = 0
    step_seconds: float = 0.0
    """The duration of the newest completed step."""
    copied_bytes: int = 0
    """Bytes of K and V that were copied between blocks."""
    command_buffers: int = 0
    """The number of MLX's command buffers with a command over K and V; 0 on a CPU."""
    measured: Distributions = NOTHING_MEASURED
    mlx: MlxMemory = NO_MLX
    disk: DiskStats = NO_DISK
    kv: KVStats | None = None
