"""Fifty agents with one system prompt, and an engine that is watched while it serves them."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from engine.loop import EngineLoop
from engine.step_plan import InFlightStep, StepPlan
from engine.types import FinishReason, Request, SamplingParams, TokenEvent
from tests.bench.models import SERVING
from tests.bench.peers import BrokenError
from tests.kvcache.managers import blocks_needed

AGENTS = 50
SYSTEM_TOKENS = 200
CONTEXT_TOKENS = (400, 800)
QUERY_TOKENS = 25
ANSWER_TOKENS = (100, 500)
# Longer without anything to run is a bug of the scheduler.
MAX_STALLED_S = 10.0


def fifty_agents(seed: int) -> list[Request]:
    """Who arrives, all at once; the same seed gives the same prompts and lengths of answers."""
    random = Random(seed)

    def some_ids(count: int) -> tuple[int, ...]:
        return tuple(random.choices(range(SERVING.vocab_size), k=count))

    system = some_ids(SYSTEM_TOKENS)
    requests = []
    for number in range(1, AGENTS + 1):
        prompt = system + some_ids(random.randint(*CONTEXT_TOKENS) + QUERY_TOKENS)
        params = SamplingParams(random.randint(*ANSWER_TOKENS), temperature=0.0)
        requests.append(Request(number, prompt, params, system_tokens=SYSTEM_TOKENS))
    return requests


@dataclass(frozen=True, slots=True)
class Moment:
    """The cache while the device runs a step."""

    running: int
    waiting: int
    live_bytes: int
    partial_tail_bytes: int
    committed_bytes: int

    @property
    def waste(self) -> float:
        """The part of the blocks with tokens that holds none."""
        return self.partial_tail_bytes / (self.live_bytes + self.partial_tail_bytes)


class Watch:
    """Stands before an engine's runner: sees every step when it has been planned, and checks that
    admission was exact."""

    def __init__(self, loop: EngineLoop) -> None:
        self.moments: list[Moment] = []
        self.refused: str | None = None
        """Why admission was not exact: somebody waited although there was room."""
        self._runner = loop._runner
        self._scheduler = loop._scheduler
        self._kv = loop._kv
        loop._runner = loop._pipeline._runner = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> InFlightStep:
        """The runner's; the figures are those that hold while it runs."""
        for waiting in self._scheduler._waiting[:1]:
            free, needed = (
                self._kv._first.allocator.available_blocks,
                blocks_needed(self._kv, waiting),
            )
            if free >= needed:
                self.refused = f"{free} blocks are free, and one waits that needs {needed}"
        step = self._runner.begin(plan, overlapped=overlapped)
        stats = self._kv.stats()
        self.moments.append(
            Moment(
                self._scheduler.num_running,
                self._scheduler.num_waiting,
                stats.live_bytes,
                stats.partial_tail_bytes,
                stats.committed_bytes,
            )
        )
        return step

    def release_cache(self) -> None:
        self._runner.release_cache()


@dataclass(frozen=True, slots=True)
class Run:
    """All agents, from their arrival to the last answer's end."""

    moments: list[Moment]
    seconds: float
    preemptions: int
    computed_tokens: int
    """Of prompts; those that are computed again included."""

    @property
    def peak_running(self) -> int:
        """The most at once."""
        return max(moment.running for moment in self.moments)

    @property
    def crowded(self) -> list[Moment]:
        """Steps while somebody waits."""
        return [moment for moment in self.moments if moment.waiting]

    @property
    def mean_running(self) -> float:
        """Over the steps while somebody waits; over all of them if nobody ever does."""
        return statistics.fmean(moment.running for moment in self.crowded or self.moments)

    @property
    def waste_percent(self) -> float:
        """The mean over the steps."""
        return 100 * statistics.fmean(moment.waste for moment in self.moments)

    @property
    def peak_waste_percent(self) -> float:
        """The worst step's."""
        return 100 * max(moment.waste for moment in self.moments)

    @property
    def peak_committed_bytes(self) -> int:
        """The most that the system ever charges."""
        return max(moment.committed_bytes for moment in self.moments)


def run_engine(loop: EngineLoop, agents: Sequence[Request]) -> Run:
    """Steps an engine by hand until all agents have their answers.

    Raises BrokenError when an answer is not whole, or admission is not exact.
    """
    watch = Watch(loop)
    events: list[TokenEvent] = []
    loop._emit = events.extend
    for request in agents:
        loop.mailbox.put(request)
    started_s = worked_s = time.perf_counter()
    finished = 0
    while finished < len(agents):
        now_s = time.perf_counter()
        if loop.run_once():
            worked_s = now_s
        elif now_s - worked_s > MAX_STALLED_S:
            raise BrokenError("the engine stands still")
        finished = sum(event.finish is not None for event in events)
    seconds = time.perf_counter() - started_s
    check_answers(agents, events)
    if watch.refused is not None:
        raise BrokenError(watch.refused)
    counters = loop._scheduler.counters
    return Run(watch.moments, seconds, counters.preemptions, counters.prompt_tokens)


def check_answers(agents: Sequence[Request], events: Sequence[TokenEvent]) -> None:
    """Raises BrokenError unless every answer has the length that was asked for."""
    for request in agents:
        own = [event for event in events if event.request_id == request.request_id]
        wanted = request.params.max_tokens
        if len(own) != wanted or own[-1].finish is not FinishReason.LENGTH:
            reason, message = own[-1].finish, own[-1].message
            raise BrokenError(f"{len(own)} of {wanted} tokens came: {reason}, {message}")
