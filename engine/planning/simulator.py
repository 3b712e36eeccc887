"""Simulates serving: runs the real scheduler, cache and loop on a clock that a cost model advances.

There is no model and no memory. The simulated runner returns a fixed token, and the simulated
memory backend only counts blocks. The results are the same on every machine.
"""

import math
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from random import Random

from engine.build import first_budget
from engine.config import EngineConfig
from engine.planning.devices import CostModel
from engine.step.loop import EngineLoop
from engine.step.plan import Outcome, PendingState, StepPlan, Token
from engine.step.scheduler import Scheduler
from engine.types import EngineLimits, PrefixSalt, Request, SamplingParams, TokenEvent
from kvcache.counting import CountingBackend, CountingStates
from kvcache.layout import KVLayout
from kvcache.manager import KVCacheManager
from kvcache.memory_budget import CacheLimits

ANY_TOKEN = 1
VOCAB_SIZE = 2
# If requests are unfinished, this many empty steps in a row prove a bug of the scheduler.
MAX_IDLE_STEPS = 100
# A simulated sequence has at least this many tokens, prompt and answer together. The answer is an
# eighth to a half of the sequence, but at most LONGEST_ANSWER_TOKENS.
SHORTEST_TOKENS = 128
ANSWER_PARTS = (1 / 8, 1 / 2)
LONGEST_ANSWER_TOKENS = 2048


class SimulatedClock:
    """The seconds since the start of a simulation; only ``advance`` changes the time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """A simulated request, and the time at which the engine receives the request."""

    at_s: float
    request: Request

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_ids) + self.request.params.max_tokens


def random_arrivals(
    seed: int, *, requests: int, longest_tokens: int, mean_gap_s: float
) -> list[Arrival]:
    """Return requests with exponentially distributed gaps between arrivals and log-uniform lengths,
    so that many are short and a few are long. No two requests share a prefix."""
    random = Random(seed)
    shortest = min(SHORTEST_TOKENS, longest_tokens)
    at_s = 0.0
    arrivals = []
    for number in range(1, requests + 1):
        tokens = round(math.exp(random.uniform(math.log(shortest), math.log(longest_tokens))))
        answer = min(LONGEST_ANSWER_TOKENS, round(tokens * random.uniform(*ANSWER_PARTS)))
        request = Request(
            number,
            (ANY_TOKEN,) * (tokens - max(1, answer)),
            SamplingParams(max(1, answer), temperature=0.0),
            salt=PrefixSalt(client=str(number).encode()),
        )
        arrivals.append(Arrival(at_s, request))
        at_s += random.expovariate(1 / mean_gap_s)
    return arrivals


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A simulated step that is complete. ``tokens`` is the number of sampled tokens."""

    tokens: int

    def submit(self, state: PendingState | None) -> None: ...

    def read(self) -> list[Outcome]:
        return [Token(ANY_TOKEN)] * self.tokens

    def cancel(self) -> None: ...


class SimulatedRunner:
    """Simulates steps: advances the clock by a step's computed time, and samples ANY_TOKEN."""

    def __init__(self, kv: KVCacheManager, cost: CostModel, clock: SimulatedClock) -> None:
        self.completed_epoch = 0
        self._kv = kv
        self._cost = cost
        self._clock = clock

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> SimulatedStep:
        """Run the whole step at once. Simulated steps do not overlap, and need no SamplingState."""
        assert not plan.needs_state
        assert not overlapped
        views = self._kv.views(plan.segments)
        self._clock.advance(self._cost.step_seconds([(e.start, e.count) for e in plan.entries]))
        self.completed_epoch = views.epoch
        return SimulatedStep(sum(entry.sampling is not None for entry in plan.entries))

    def release_cache(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """The start and end of a simulated step, and the engine's counts at the step's end."""

    start_s: float
    end_s: float
    running: int
    waiting: int
    committed_bytes: int


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The results of a simulated workload."""

    moments: tuple[Moment, ...]
    waits_s: tuple[float, ...]
    """The time from each request's arrival to its first token."""
    generated_tokens: int
    preemptions: int

    @property
    def seconds(self) -> float:
        return self.moments[-1].end_s

    @property
    def mean_running(self) -> float:
        """Return the mean number of running sequences. If any moments have waiting sequences, only
        these moments count."""
        crowded = [m for m in self.moments if m.waiting] or self.moments
        spans = [m.end_s - m.start_s for m in crowded]
        return sum(s * m.running for s, m in zip(spans, crowded, strict=True)) / sum(spans)

    @property
    def peak_running(self) -> int:
        return max(moment.running for moment in self.moments)

    @property
    def peak_committed_bytes(self) -> int:
        return max(moment.committed_bytes for moment in self.moments)

    @property
    def mean_wait_s(self) -> float:
        return sum(self.waits_s) / len(self.waits_s)


class Simulation:
    """A simulated engine, and the requests that arrive at it."""

    def __init__(
        self,
        layout: KVLayout,
        cost: CostModel,
        config: EngineConfig,
        arrivals: SequenceOf[Arrival],
        *,
        max_model_len: int,
        kv_budget_bytes: int,
        num_slots: int = 0,
    ) -> None:
        """``arrivals`` must be ordered by time and fit the context. ``num_slots`` slots (recurrent
        states of a sequence) exist in addition to ``kv_budget_bytes``."""
        config = replace(
            config,
            free_slack_bytes=0,
            max_sharers=config.max_num_seqs,
            idle_release_s=math.inf,
            prefix_keep_s=math.inf,
            overlap=False,
            max_step_mask_s=math.inf,
            grammar_bytes=0,
        )
        self.clock = SimulatedClock()
        self.backends = [CountingBackend(group) for group in layout.groups]
        self.states: CountingStates | None = None
        if (slot := layout.shape.slot) is not None:
            self.states = CountingStates(num_slots, slot.slot_bytes)
        self.kv = KVCacheManager(
            layout,
            self.backends,
            CacheLimits(kv_budget_bytes, config.max_num_seqs, config),
            identity=b"simulated",
            states=self.states,
        )
        self.scheduler = Scheduler(
            self.kv,
            EngineLimits(max_model_len, config.max_num_seqs, VOCAB_SIZE),
            first_budget(config),
            config.max_num_batched_tokens,
        )
        self.loop = EngineLoop(
            self.scheduler,
            self.kv,
            SimulatedRunner(self.kv, cost, self.clock),
            config,
            emit=self._take,
            clock=self.clock,
        )
        self._coming = deque(arrivals)
        self._arrived_s: dict[int, float] = {}
        self._first_token_s: dict[int, float] = {}
        self._unfinished: set[int] = set()
        self._moments: list[Moment] = []
        self._idle_steps = 0

    def run(self) -> SimulationReport:
        while self._coming or self._unfinished:
            self.step()
        counters = self.scheduler.counters
        return SimulationReport(
            tuple(self._moments),
            tuple(self._first_token_s[i] - at_s for i, at_s in self._arrived_s.items()),
            counters.generated_tokens,
            counters.preemptions,
        )

    def step(self) -> None:
        """Submit the requests that have arrived, and run one step. If the engine has no requests,
        advance the clock to the next arrival."""
        start_s = self.clock.now_s
        while self._coming and self._coming[0].at_s <= start_s:
            arrival = self._coming.popleft()
            self._arrived_s[arrival.request.request_id] = arrival.at_s
            self._unfinished.add(arrival.request.request_id)
            self.loop.mailbox.put(arrival.request)
        if self.loop.run_once():
            self._idle_steps = 0
            self._moments.append(
                Moment(
                    start_s,
                    self.clock.now_s,
                    self.scheduler.num_running,
                    self.scheduler.num_waiting,
                    self._committed_bytes(),
                )
            )
        elif self._unfinished:
            self._idle_steps += 1
            assert self._idle_steps < MAX_IDLE_STEPS, "the engine stands still"
        else:
            self.clock.advance(max(0.0, self._coming[0].at_s - start_s))

    def _committed_bytes(self) -> int:
        slots = self.states
        states = 0 if slots is None else slots.committed_bytes(range(slots.num_slots))
        return sum(backend.committed_bytes() for backend in self.backends) + states

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.message is None, event.message
            self._first_token_s.setdefault(event.request_id, self.clock.now_s)
            if event.finish is not None:
                self._unfinished.remove(event.request_id)
