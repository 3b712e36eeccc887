"""What scheduler and cache cost beside the model's own step, and how that grows."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.build import build_engine, plan_engine
from engine.loop import EngineLoop
from engine.machine import machine_memory
from engine.models.checkpoint import read_checkpoint
from engine.runner import ModelRunner, ModelStep
from engine.types import PrefixSalt, Request, SamplingParams
from tests.bench.models import SERVING, write_endless_model
from tests.bench.rounds import Part, Rounds
from tests.bench.table import Goal, Row
from tests.engines import CONFIG, ON_CPU
from tests.kvcache.managers import complete_steps

GIB = 1024**3
SEQUENCES = (8, 64, 256)
CACHED_BLOCKS = (10, 1000, 100_000)
JUDGED_SEQUENCES = 64
MOST_OF_A_STEP = 0.1
PROMPT_TOKENS = 100
MODEL_LEN = 2048
STEPS = 60
WARM_UP_STEPS = 10


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of steps that decode one token of every sequence: medians, microseconds."""

    ours: float
    """The scheduler's schedule and commit, the cache's views and step_completed."""
    model: float
    """The forward pass and the sampler."""


class Stopwatch:
    """Adds up the time in some methods of an object; passes everything on."""

    def __init__(self, target: Any, *methods: str) -> None:
        self.seconds = 0.0
        self._target = target
        for method in methods:
            setattr(self, method, self._timed(getattr(target, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started_s = time.perf_counter()
            result = method(*arguments, **named)
            self.seconds += time.perf_counter() - started_s
            return result

        return timed

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Watched:
    """An engine with stopwatches around scheduler, cache and model."""

    def __init__(self, loop: EngineLoop) -> None:
        runner = loop._runner
        assert isinstance(runner, ModelRunner)
        cache = Stopwatch(loop._kv, "views", "step_completed")
        scheduler = Stopwatch(loop._scheduler, "schedule", "commit")
        self._ours = (scheduler, cache)
        self._model = Stopwatch(runner, "_build")
        loop._scheduler = scheduler  # type: ignore[assignment]
        loop._kv = runner._kv = cache  # type: ignore[assignment]
        runner._build = self._build  # type: ignore[method-assign,assignment]

    def _build(self, *arguments: Any) -> ModelStep:
        step: ModelStep = self._model._build(*arguments)
        step.read = self._model._timed(step.read)  # type: ignore[method-assign]
        return step

    def take(self) -> tuple[float, float]:
        """Seconds of scheduler and cache, and of the model, since the last call."""
        return sum(watch.take() for watch in self._ours), self._model.take()


def run_overhead(rounds: Rounds, threads: int, folder: Path) -> Part:
    """In this process. folder: where the model goes."""
    model = write_endless_model(folder / "overhead", SERVING)
    by_sequences: dict[int, list[StepTimes]] = {n: [] for n in SEQUENCES}
    by_cached: dict[int, list[StepTimes]] = {n: [] for n in CACHED_BLOCKS}
    for _ in rounds:
        for sequences in SEQUENCES:
            by_sequences[sequences].append(
                measure_steps(model, threads, sequences, CACHED_BLOCKS[0])
            )
        for cached in CACHED_BLOCKS:
            by_cached[cached].append(measure_steps(model, threads, JUDGED_SEQUENCES, cached))
    rows = [_row(f"{n} sequences", n, times) for n, times in by_sequences.items()]
    rows += [
        _row(f"{JUDGED_SEQUENCES} sequences, {n} cached blocks", JUDGED_SEQUENCES, times)
        for n, times in by_cached.items()
    ]
    return Part(rows, [("scheduler and cache", f"{STEPS} steps a round, fp32, 2 layers")])


def measure_steps(folder: Path, threads: int, sequences: int, cached: int) -> StepTimes:
    """Of an engine that decodes so many sequences while so many blocks lie in its cache."""
    loop = _engine(folder, threads, sequences)
    _fill(loop, cached)
    watched = Watched(loop)
    for number in range(1, sequences + 1):
        # No two begin alike: every sequence has blocks of its own.
        prompt = (number, *range(PROMPT_TOKENS - 1))
        most = WARM_UP_STEPS + 2 * STEPS
        loop.mailbox.put(Request(number, prompt, SamplingParams(most, temperature=0.0)))
    while loop.stats.generated_tokens < sequences * WARM_UP_STEPS:
        loop.run_once()
    watched.take()
    times = []
    for _ in range(STEPS):
        loop.run_once()
        times.append(watched.take())
    assert len(loop._kv._first.prefixes.index) >= cached
    ours, model = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
    return StepTimes(ours, model)


def _engine(model: Path, threads: int, sequences: int) -> EngineLoop:
    checkpoint = read_checkpoint(model)
    config = replace(
        CONFIG,
        page_bytes=None,
        heap_bytes=GIB // 16,
        kv_budget_bytes=3 * GIB,
        free_slack_bytes=GIB // 4,
        max_model_len=MODEL_LEN,
        max_num_seqs=sequences,
        max_num_batched_tokens=8192,
        threads=threads,
        check_every_step=False,
    )
    machine = replace(machine_memory(), available_bytes=8 * GIB)
    plan = plan_engine(config, checkpoint, machine, ON_CPU["posix"])
    return build_engine(plan, config, lambda *_: None, lambda _: None)


def _fill(loop: EngineLoop, blocks: int) -> None:
    """Leaves so many blocks of short conversations in the cache. Nothing is computed, so that they
    take no memory."""
    kv = loop._kv
    tokens_per_block = kv._first.group.tokens_per_block
    longest = MODEL_LEN // tokens_per_block
    for number in itertools.count(1):
        missing = min(longest, blocks - len(kv._first.prefixes.index))
        if missing <= 0:
            return
        tokens = missing * tokens_per_block
        ids = [number % SERVING.vocab_size, number // SERVING.vocab_size] + [0] * (tokens - 2)
        hashes = kv.block_hashes(PrefixSalt(b"cached"))
        hashes.extend(ids, 0)
        assert kv.open(-number, hashes, tokens, final_tokens=tokens)
        assert kv.reserve(-number, tokens)
        kv.views([(-number, 0, tokens)])
        kv.commit(-number, ids)
        complete_steps(kv)
        kv.close(-number)
        while kv.recovering:
            complete_steps(kv)


def _row(name: str, sequences: int, times: list[StepTimes]) -> Row:
    ours = [one.ours / sequences for one in times]
    model = [one.model / sequences for one in times]
    row = Row.lower_is_better(f"scheduler and cache, {name}", "us/seq", ours, ("model", model))
    if sequences != JUDGED_SEQUENCES:
        return row
    return row.with_goal(Goal.at_least(row.ratio.value, 1 / MOST_OF_A_STEP))
