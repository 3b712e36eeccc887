"""The world of a seed: the limits of an engine, the manners of its machine, and its traffic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from engine.machine import PressureLevel
from engine.types import (
    EngineLimits,
    PrefixSalt,
    PromptBoundaries,
    Request,
    SamplingParams,
)
from kvcache.layout import KVFormat, KVLayout, KVShape, KVSpec, grouped_layout
from kvcache.slot_pool import SLOTS_PER_SEQUENCE
from tests.engines import request_of
from tests.kvcache.strict_memory import Manners
from tests.kvcache.strict_states import STATES
from tests.simulation.recall import ruled
from tests.simulation.runner import DeviceTraits

VOCAB = 997
STOP_TOKENS = frozenset(range(0, VOCAB, 60))


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """The limits of an engine."""

    layout: KVLayout
    budget_bytes: int
    free_slack_bytes: int
    limits: EngineLimits
    max_sharers: int
    shares_prefixes: bool
    max_num_batched_tokens: int
    min_budget_tokens: int
    step_target_s: float
    idle_release_s: float
    prefix_keep_s: float
    num_slots: int = 0
    """Slots of a model with recurrent layers; 0: it has none."""


@dataclass(frozen=True, slots=True)
class MemoryTraits:
    """The manners of the memory."""

    slowness: float
    fault_rate: float
    longest_storm: int
    most_refusals: int
    stuck_rate: float
    manners: Manners
    shares_blocks: bool
    mapping_limit: int | None
    heap_limit: int | None
    maps_while_running: bool


@dataclass(frozen=True, slots=True)
class TrafficTraits:
    """The arrival and manners of requests."""

    arrivals: tuple[float, ...]
    """The times of requests, in seconds, rising."""
    longest_prompt: int
    longest_answer: int
    system_prompts: tuple[tuple[int, ...], ...]
    salts: tuple[PrefixSalt, ...]
    abort_rate: float
    slow_reader_rate: float
    fork_rate: float
    turn_rate: float
    priority_rate: float
    max_backlog: int
    late_delivery_rate: float
    fatal_faults: bool
    """Whether a second step may fail within a minute."""
    scoring_rate: float
    """The share of requests for the prompt's log probabilities."""
    pooling_rate: float
    """The share of requests for a vector."""
    rule_rate: float
    """The share of requests with a constraint, penalties or ``min_tokens``."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything but the draws that depend on events."""

    engine: EngineTraits
    memory: MemoryTraits
    device: DeviceTraits
    traffic: TrafficTraits
    pressure_rate: float
    """The rate of changes of the memory pressure."""
    overlap: bool
    """Whether steps are begun before the one in flight is read."""
    pressure: PressureLevel = PressureLevel.NORMAL
    """The memory pressure at the beginning."""


def draw_world(rng: Random, groups: int = 1, *, states: bool = False) -> World:
    """Draw a small engine on a more or less unfriendly machine. groups: kinds of layers of its
    model. states: whether it has recurrent layers as well."""
    engine = _draw_engine(rng, groups)
    if states:
        engine = _with_slots(engine, Random(engine.budget_bytes))
    device = DeviceTraits(
        vocab_size=VOCAB,
        longest_lag=rng.choice((0, 1, 1, 2, 4)),
        fault_rate=rng.choice((0.0, 0.0, 0.0, 0.01, 0.05)),
        bad_row_rate=rng.choice((0.0, 0.0, 0.0, 0.02, 0.2)),
        step_s=10 ** rng.uniform(-4, -2),
        token_s=10 ** rng.uniform(-5, -3),
    )
    memory, traffic = _draw_memory(rng, engine), _draw_traffic(rng, engine)
    device = replace(device, model_is_broken=rng.random() < 0.02)
    pressure_rate = rng.choice((0.0, 0.0, 0.01, 0.2))
    overlap = rng.random() < 0.75
    # Last, so that lives without rules stay the same.
    traffic = replace(traffic, rule_rate=rng.choice((0.0, 0.3, 0.8)))
    if memory.shares_blocks and rng.random() < 0.4:
        manners = rng.choice((Manners.IDLE, Manners.NOTHING))
        memory = replace(memory, maps_while_running=False, mapping_limit=None, manners=manners)
    return World(engine, memory, device, traffic, pressure_rate, overlap)


def _layout(groups: int, tokens_per_block: int, heap_blocks: int, buffer_blocks: int) -> KVLayout:
    """Return a layout with a layer of each kind; the rows of the next kind are twice as wide, and
    its pages half as long where that can be."""
    shape = KVShape(tuple(KVSpec(1, 2**kind, KVFormat.FLOAT32) for kind in range(groups)))
    divisor = 2 if tokens_per_block % 2 == 0 else 1
    pages = {
        spec: spec.row_bytes * tokens_per_block // (1 if kind == 0 else divisor)
        for kind, spec in enumerate(shape.specs)
    }
    return grouped_layout(
        shape,
        pages,
        tokens_per_block=tokens_per_block,
        blocks_per_heap=heap_blocks,
        blocks_per_buffer=buffer_blocks,
    )


def _draw_engine(rng: Random, groups: int) -> EngineTraits:
    tokens_per_block = rng.choice((1, 2, 3, 4, 4, 5, 8, 16))
    max_model_len = rng.choice((rng.randint(2, 24), rng.randint(24, 64), rng.randint(64, 160)))
    blocks_per_heap = rng.choice((1, 2, 3, 5, 8))
    dense = rng.random() < 0.08
    if dense:
        tokens_per_block, blocks_per_heap = max_model_len, 1
    buffer_blocks = -(-max_model_len // tokens_per_block)
    layout = _layout(groups, tokens_per_block, blocks_per_heap, buffer_blocks)
    max_num_seqs = rng.choice((1, 2, 3, 4, 4, 6, 8))
    roominess = rng.choice((1.0, 1.0, 1.3, 1.6, 2.0, 3.0, float(max_num_seqs)))
    heaps = -(-int(buffer_blocks * min(roominess, max_num_seqs)) // blocks_per_heap)
    pool_tokens = heaps * blocks_per_heap * tokens_per_block
    most = rng.choice((1, 3, 8, 16, 40, 64))
    return EngineTraits(
        layout=layout,
        budget_bytes=heaps * layout.heap_bytes + rng.randrange(layout.heap_bytes),
        free_slack_bytes=rng.randint(0, heaps) * layout.groups[0].heap_bytes,
        limits=EngineLimits(min(max_model_len, pool_tokens), max_num_seqs, VOCAB),
        max_sharers=rng.choice((2, 3, 1000, 1000)),
        shares_prefixes=rng.random() < 0.9,
        max_num_batched_tokens=most,
        min_budget_tokens=rng.randint(1, most),
        step_target_s=10 ** rng.uniform(-3, -1),
        idle_release_s=rng.choice((0.0, 0.05, 1.0)),
        prefix_keep_s=rng.choice((0.0, 0.2, 10.0, 1000.0)),
    )


def _with_slots(engine: EngineTraits, rng: Random) -> EngineTraits:
    """Add a recurrent layer, and slots for one sequence at least."""
    shape = replace(engine.layout.shape, states=STATES)
    most = SLOTS_PER_SEQUENCE * engine.limits.max_num_seqs
    few = SLOTS_PER_SEQUENCE + rng.randrange(3)
    many = max(few, most) + rng.randrange(20)
    num_slots = rng.choice((few, rng.randint(few, many), many))
    return replace(engine, layout=replace(engine.layout, shape=shape), num_slots=num_slots)


def _draw_memory(rng: Random, engine: EngineTraits) -> MemoryTraits:
    group = engine.layout.groups[0]
    heaps = engine.budget_bytes // engine.layout.heap_bytes
    refuses = rng.random() < 0.4
    # A sequence of single blocks takes one mapping per region and block, and the gap behind them.
    longest = len(group.regions) * (group.blocks_per_buffer + 1)
    limit = round(longest * rng.uniform(0.7, 3.0)) if rng.random() < 0.2 else None
    return MemoryTraits(
        slowness=rng.choice((0.0, 0.3, 0.7, 0.9)),
        fault_rate=rng.choice((0.01, 0.05, 0.2)) if refuses else 0.0,
        longest_storm=rng.choice((1, 3, 12)),
        most_refusals=rng.randint(1, 60),
        stuck_rate=0.2 if rng.random() < 0.03 else 0.0,
        manners=Manners.drawn(rng.random()),
        shares_blocks=group.blocks_per_buffer > 1,
        mapping_limit=limit,
        heap_limit=heaps if rng.random() < 0.1 else None,
        maps_while_running=True,
    )


def _draw_traffic(rng: Random, engine: EngineTraits) -> TrafficTraits:
    longest = engine.limits.max_model_len - 1
    systems = []
    for _ in range(rng.randint(1, 3)):
        systems.append(_draw_tokens(rng, rng.randint(0, longest * 2 // 3)))
    tenants = [bytes([i]) * rng.randint(0, 2) for i in range(rng.choice((1, 1, 2)))]
    return TrafficTraits(
        arrivals=_draw_arrivals(rng),
        longest_prompt=max(1, round(longest * rng.choice((0.2, 0.4, 0.7, 1.0)))),
        longest_answer=rng.choice((1, 6, 30, 60)),
        system_prompts=tuple(systems),
        salts=tuple(PrefixSalt(tenant, client) for tenant in tenants for client in (b"", b"own"))[
            : rng.randint(1, 4)
        ],
        abort_rate=rng.choice((0.0, 0.1, 0.3)),
        slow_reader_rate=rng.choice((0.0, 0.0, 0.2)),
        fork_rate=rng.choice((0.0, 0.1, 0.3)),
        turn_rate=rng.choice((0.0, 0.2, 0.5)),
        priority_rate=rng.choice((0.0, 0.0, 0.2)),
        max_backlog=rng.choice((1, 3, 8)),
        late_delivery_rate=rng.choice((0.0, 0.5)),
        fatal_faults=rng.random() < 0.05,
        scoring_rate=rng.choice((0.0, 0.3, 0.8)),
        pooling_rate=rng.choice((0.0, 0.0, 0.3)),
        rule_rate=0.0,
    )


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


def _draw_boundaries(rng: Random, prompt: int, system: int) -> PromptBoundaries:
    """Draw the places where others may leave a prompt; sometimes there are none. The seed is its
    own: without states it changes nothing."""
    if rng.random() < 0.3:
        return PromptBoundaries(system)
    user_end = rng.randint(system, prompt)
    return PromptBoundaries(system, user_end, rng.randint(user_end, prompt))


def _draw_tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(count))


class Traffic:
    """Draws requests, which may go on from earlier ones."""

    def __init__(self, traits: TrafficTraits, rng: Random, max_model_len: int) -> None:
        self._traits = traits
        self._rng = rng
        self._max_model_len = max_model_len
        self._last_id = 0

    def draw(self, past: Sequence[tuple[Request, list[int]]]) -> Request:
        """Return a request. past: earlier ones, with all tokens that they have by now."""
        rng, traits = self._rng, self._traits
        if past and rng.random() < traits.turn_rate:
            request = self._draw_turn(*rng.choice(past[-8:]))
        elif past and rng.random() < traits.fork_rate / 4:
            request = self._repeated(rng.choice(past[-4:])[0])
        else:
            request = self._draw_fresh()
        if rng.random() < traits.fork_rate:
            others = [self._repeated(request) for _ in range(rng.randint(1, 3))]
            params = tuple(
                request.params[0] if request.pooling or each.pooling else each.params[0]
                for each in others
            )
            request = replace(request, params=request.params + params)
        return request

    def _draw_fresh(self) -> Request:
        system = self._rng.choice(self._traits.system_prompts)[: self._traits.longest_prompt]
        if self._rng.random() < 0.2:
            system = ()
        rest = self._traits.longest_prompt - len(system)
        tail = _draw_tokens(self._rng, self._rng.randint(0, rest))
        prompt = system + tail or _draw_tokens(self._rng, 1)
        return self._request(prompt, self._rng.choice(self._traits.salts), len(system))

    def _draw_turn(self, before: Request, tokens: list[int]) -> Request:
        """Go on with the conversation, or repeat the same prompt."""
        prompt = before.prompt_ids
        if self._rng.random() < 0.8:
            prompt = (*tokens, *_draw_tokens(self._rng, self._rng.randint(0, 8)))
        prompt = prompt[: self._max_model_len - 1]
        return self._request(prompt, before.salt, min(before.boundaries.system_end, len(prompt)))

    def _repeated(self, request: Request) -> Request:
        """Return another request with the same prompt."""
        again = self._request(request.prompt_ids, request.salt, request.boundaries.system_end)
        return replace(again, priority=request.priority)

    def _request(self, prompt: tuple[int, ...], salt: PrefixSalt, system_end: int) -> Request:
        rng = self._rng
        self._last_id += 1
        urgent = rng.random() < self._traits.priority_rate
        params = SamplingParams(
            max_tokens=rng.randint(1, self._traits.longest_answer),
            seed=rng.getrandbits(64),
            stop_token_ids=STOP_TOKENS if rng.random() < 0.5 else frozenset(),
        )
        priority = rng.randint(-1, 1) if urgent else 0
        boundaries = _draw_boundaries(Random(~params.seed), len(prompt), system_end)
        request = request_of(
            self._last_id,
            prompt,
            params,
            priority=priority,
            salt=salt,
            boundaries=boundaries,
        )
        return self._of_some_kind(request)

    def _of_some_kind(self, request: Request) -> Request:
        """Return the request as it is, for something else than tokens, or with rules. It is drawn
        from a seed of its own, so that lives without such requests stay the same."""
        (params,) = request.params
        rng, traits = Random(params.seed), self._traits
        if rng.random() < traits.pooling_rate:
            return replace(request, params=(replace(params, max_tokens=0),), pooling=True)
        if rng.random() < traits.scoring_rate:
            tokens = rng.choice((0, params.max_tokens))
            params = replace(params, max_tokens=tokens, prompt_logprobs=0)
            request = replace(request, params=(params,))
        if rng.random() < traits.rule_rate:
            request = ruled(request, rng, VOCAB)
        return request
