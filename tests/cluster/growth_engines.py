"""Replicas whose engines are the simulator's: production scheduler, cache and loop.

Each replica is a machine of tests/simulation with a clock of its own; the one that is behind
steps first. Every token is compared with a reference without a cache, whichever replica it is from.

What is assumed: machines are alike, or 1, 2 and 4 times as fast; a step of the slowest takes 5 ms
and 1 ms for each of its rows, times 0.5 to 2 by chance. Replicas find out themselves how fast they
compute prompts, and say so, unless a table says something else. All conversations begin with the
same 200 tokens, and go on with 40 to 160 asked and 8 to 24 answered; people think for 1 to 4 s;
replicas report every 0.5 s, with what they evicted, and which states a hybrid keeps.

*Possible* hits are those of one cache that holds everything and forgets nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from random import Random

from engine.loop import STALLED_POLL_S
from engine.types import (
    EngineLimits,
    FinishReason,
    PrefixSalt,
    Request,
    SamplingParams,
    TokenEvent,
    Turns,
    planned_seals,
)
from kvcache.block_hashes import BlockHashes
from kvcache.layout import KVFormat, KVLayout, KVShape, KVSpec, grouped_layout
from server.cluster.prefix_router import Flight, Load
from server.cluster.replica import PromptSpeed
from server.cluster.routing import with_all_speeds
from tests.cluster.policies import Policy
from tests.kvcache.strict_memory import Manners
from tests.kvcache.strict_states import STATES
from tests.simulation.machine import Machine
from tests.simulation.recall import Recall
from tests.simulation.runner import DeviceTraits
from tests.simulation.world import VOCAB, EngineTraits, MemoryTraits, TrafficTraits, World

BLOCK_TOKENS = 16
HEAP_BLOCKS = 64
CONTEXT_TOKENS = 2048
MOST_AT_ONCE = 16
STEP_S, TOKEN_S = 5e-3, 1e-3
REPORT_S = 0.5
SALT = PrefixSalt(b"everybody")


@dataclass(frozen=True, slots=True)
class Talk:
    """Who talks to each replica's worth of machines."""

    conversations: int = 12
    """Per replica."""
    turns: int = 6
    system_tokens: int = 200
    asked: tuple[int, int] = (40, 160)
    """Tokens of a question, at least and at most."""
    answered: tuple[int, int] = (8, 24)
    thinking_s: tuple[float, float] = (1.0, 4.0)
    cache_tokens: int = 24 * 1024
    """Of each replica: enough for a replica's part."""
    cells: int = 0
    """Of each replica, where the model has recurrent layers; 0 where it has none."""


@dataclass(slots=True)
class Asked:
    """A request in flight."""

    conversation: "Conversation"
    replica: "EngineReplica"
    flight: Flight | None
    recall: Recall
    prompt_tokens: int
    max_tokens: int
    possible_tokens: int
    promised_tokens: int
    asked_s: float
    answered: int = 0


@dataclass(slots=True)
class Conversation:
    """What was said so far."""

    tokens: list[int]
    turns_left: int


@dataclass(slots=True)
class Account:
    """What a run has come to."""

    requests: int = 0
    seconds: float = 0.0
    cached_tokens: int = 0
    possible_tokens: int = 0
    promised_tokens: int = 0
    """That the router took for cached where it sent requests."""
    computed_tokens: int = 0
    answered_s: list[float] = field(default_factory=list)
    """From each question to the end of its answer."""
    first_token_s: list[float] = field(default_factory=list)
    by_replica: list[int] = field(default_factory=list)
    """Requests of each."""
    evicted_blocks: int = 0

    @property
    def hit_ratio(self) -> float:
        """Of the tokens that could have been cached."""
        return self.cached_tokens / self.possible_tokens

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def promised_ratio(self) -> float:
        """What the router took for cached, beside what was."""
        return self.promised_tokens / self.cached_tokens

    def first_s(self, share: float) -> float:
        """What so large a share of first tokens did not take longer than."""
        return _quantile(self.first_token_s, share)

    def answer_s(self, share: float) -> float:
        """What so large a share of answers did not take longer than."""
        return _quantile(self.answered_s, share)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


class Told(Enum):
    """What routers are told of how fast a replica computes prompts."""

    MEASURED = "measured"
    """What production code tells from the engine's counters."""
    RIGHT = "right"
    NOTHING = "nothing"


class EngineReplica:
    """An engine of production parts on a machine of its own."""

    def __init__(
        self, name: str, seed: int, talk: "Talk", speed: float, hear: Callable[..., None]
    ) -> None:
        """speed: how many times as fast as the slowest."""
        world = a_world(talk, speed)
        self.name = name
        self.speed = speed
        self._measured = PromptSpeed()
        self.measured = 0.0
        """Tokens of prompts per second, as the replica reports it."""
        self.recalls: dict[int, Recall] = {}
        self.machine = Machine(
            seed, world, lambda events: hear(self, events), lambda number: self.recalls[number]
        )
        self.live = 0
        self.requests = 0
        self._budget_bytes = world.engine.budget_bytes

    @property
    def now_s(self) -> float:
        return self.machine.clock.now

    @property
    def held(self) -> set[bytes]:
        """The hashes of all blocks that it could share."""
        return set(self.machine.kv._first.prefixes.index._blocks)

    def submit(self, request: Request, recall: Recall, now_s: float) -> None:
        """Give it a request, at a time; it was idle until then if its clock is behind."""
        if not self.live:
            self.machine.clock.now = max(self.machine.clock.now, now_s)
        self.live += 1
        self.requests += 1
        self.recalls[request.request_id] = recall
        self.machine.loop.mailbox.put(request)

    def step(self) -> None:
        self.machine.runner.tick()
        if not self.machine.loop.run_once():
            self.machine.clock.now += STALLED_POLL_S

    def load(self, told: Told) -> Load:
        """As a replica reports it. Heaps that it has not made yet are free as well."""
        scheduler, stats = self.machine.scheduler, self.machine.kv.stats()
        used_bytes = stats.capacity_bytes - stats.free_bytes
        free, total = self._budget_bytes - used_bytes, self._budget_bytes
        size = stats.block_bytes
        waiting, running = scheduler.num_waiting, scheduler.num_running
        self.measured = self._measured.of(self.machine.loop.stats)
        speed = {Told.MEASURED: self.measured, Told.RIGHT: self.speed / TOKEN_S, Told.NOTHING: 0.0}
        return Load(waiting, running, free // size, total // size, speed[told])


class Cluster:
    """Replicas, a router and those who talk."""

    def __init__(
        self,
        replicas: int,
        policy: Policy,
        talk: Talk,
        seed: int,
        *,
        speeds: Sequence[float] = (1.0,),
        told: Told = Told.MEASURED,
    ) -> None:
        """speeds: of the machines, in turn. told: of them to the policy."""
        self.account = Account()
        self.replicas = {
            name: EngineReplica(name, seed + number, talk, speeds[number % len(speeds)], self._hear)
            for number, name in enumerate(names(replicas))
        }
        self._policy = policy
        self._told = told
        self._talk = talk
        self._random = Random(seed)
        self._numbers = count(1)
        self._due: list[tuple[float, int, Conversation]] = []
        self._flying: dict[int, Asked] = {}
        self._seen: set[bytes] = set()
        self._cache = next(iter(self.replicas.values())).machine.kv
        """Of the replicas, as far as they are alike."""
        system = self._some(talk.system_tokens)
        for number in range(replicas * talk.conversations):
            at_s = self._random.uniform(*talk.thinking_s)
            heappush(self._due, (at_s, number, Conversation([*system], talk.turns)))

    def run(self) -> Account:
        """Until everybody has said everything."""
        report_s = 0.0
        while self._due or self._flying:
            busy = [each for each in self.replicas.values() if each.live]
            behind = min(busy, key=lambda each: each.now_s, default=None)
            asks_s = self._due[0][0] if self._due else math.inf
            now_s = asks_s if behind is None else min(behind.now_s, asks_s)
            if now_s >= report_s:
                self._report()
                report_s = now_s + REPORT_S
            if behind is None or asks_s < behind.now_s:
                self._ask(*heappop(self._due))
            else:
                behind.step()
        for each in self.replicas.values():
            each.machine.kv.check_invariants()
            assert each.held <= self._seen, "the replicas' hashes are not the router's"
            self.account.evicted_blocks += each.machine.kv.stats().evicted_blocks
            self.account.by_replica.append(each.requests)
        self.account.seconds = max(each.now_s for each in self.replicas.values())
        return self.account

    def share_of(self, speed: float) -> float:
        """The share of all requests that machines of a speed got."""
        got = sum(each.requests for each in self.replicas.values() if each.speed == speed)
        return got / self.account.requests

    def _report(self) -> None:
        loads = {each.name: each.load(self._told) for each in self.replicas.values()}
        for name, load in with_all_speeds(loads).items():
            self._policy.report(name, load, self.replicas[name].machine.kv.take_prefix_news())

    def _ask(self, now_s: float, _: int, conversation: Conversation) -> None:
        """Somebody's next question."""
        talk, number = self._talk, next(self._numbers)
        conversation.tokens += self._some(self._random.randint(*talk.asked))
        conversation.turns_left -= 1
        prompt = tuple(conversation.tokens)
        hashes = self._hashes(prompt)
        turns = Turns(0, len(prompt))
        ends = sorted(planned_seals(hashes, talk.system_tokens, turns))
        name = self._policy.choose(hashes.digests, len(prompt))
        replica = self.replicas[name]
        params = SamplingParams(self._random.randint(*talk.answered), temperature=0.0, seed=number)
        recall = Recall(prompt, number, VOCAB)
        self._flying[number] = Asked(
            conversation,
            replica,
            self._policy.sent(name, hashes.digests, len(prompt), ends),
            recall,
            len(prompt),
            params.max_tokens,
            self._possible(hashes),
            self._policy.matched * BLOCK_TOKENS,
            now_s,
        )
        self._seen.update(hashes.digests)
        request = Request(
            number, prompt, params, salt=SALT, system_tokens=talk.system_tokens, turns=turns
        )
        replica.submit(request, recall, now_s)

    def _hear(self, replica: EngineReplica, events: Sequence[TokenEvent]) -> None:
        """A replica speaks."""
        for event in events:
            asked = self._flying[event.request_id]
            assert event.token_id is not None, event.message
            right = asked.recall.token(asked.prompt_tokens + asked.answered)
            assert event.token_id == right, f"{replica.name} answers {event.token_id}, not {right}"
            if asked.answered == 0:
                self._begin(asked, event)
            asked.answered += 1
            asked.conversation.tokens.append(event.token_id)
            if event.finish is not None:
                assert event.finish is FinishReason.LENGTH
                self._end(event.request_id, asked)

    def _begin(self, asked: Asked, event: TokenEvent) -> None:
        account, prefix = self.account, event.prefix
        assert prefix is not None
        account.requests += 1
        account.cached_tokens += prefix.cached_tokens
        account.possible_tokens += asked.possible_tokens
        account.promised_tokens += asked.promised_tokens
        account.computed_tokens += asked.prompt_tokens - prefix.cached_tokens
        account.first_token_s.append(asked.replica.now_s - asked.asked_s)
        self._policy.started(asked.replica.name, asked.flight)

    def _end(self, number: int, asked: Asked) -> None:
        conversation, replica = asked.conversation, asked.replica
        assert asked.answered == asked.max_tokens
        del self._flying[number]
        replica.live -= 1
        # The newest token was sampled, and is in no cache.
        digests = self._hashes(conversation.tokens[:-1]).digests
        self._seen.update(digests)
        self._policy.finished(replica.name, asked.flight, digests)
        self.account.answered_s.append(replica.now_s - asked.asked_s)
        if conversation.turns_left:
            at_s = replica.now_s + self._random.uniform(*self._talk.thinking_s)
            heappush(self._due, (at_s, number, conversation))

    def _hashes(self, tokens: Sequence[int]) -> BlockHashes:
        """As the ingress computes them: the same as each replica's own."""
        hashes = self._cache.block_hashes(SALT)
        hashes.extend(tokens, 0)
        return hashes

    def _possible(self, hashes: BlockHashes) -> int:
        """Tokens of the prompt that somebody has sent or got before."""
        known = 0
        while known < hashes.shareable_blocks and hashes.digests[known] in self._seen:
            known += 1
        return known * BLOCK_TOKENS

    def _some(self, tokens: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(tokens)]


def names(replicas: int) -> list[str]:
    return [f"replica-{number}" for number in range(replicas)]


def a_layout(cells: int) -> KVLayout:
    shape = KVShape((KVSpec(1, 1, KVFormat.FLOAT32),), STATES if cells else ())
    (spec,) = shape.specs
    return grouped_layout(
        shape,
        {spec: spec.row_bytes * BLOCK_TOKENS},
        tokens_per_block=BLOCK_TOKENS,
        blocks_per_heap=HEAP_BLOCKS,
        blocks_per_buffer=CONTEXT_TOKENS // BLOCK_TOKENS,
    )


def a_world(talk: Talk, speed: float) -> World:
    """A friendly machine."""
    layout = a_layout(talk.cells)
    heap_tokens = HEAP_BLOCKS * BLOCK_TOKENS
    heaps = -(-talk.cache_tokens // heap_tokens)
    engine = EngineTraits(
        layout=layout,
        budget_bytes=heaps * layout.groups[0].heap_bytes,
        free_slack_bytes=heaps * layout.groups[0].heap_bytes,
        limits=EngineLimits(CONTEXT_TOKENS, MOST_AT_ONCE, VOCAB),
        max_sharers=MOST_AT_ONCE,
        shares_prefixes=True,
        max_num_batched_tokens=256,
        min_budget_tokens=16,
        step_target_s=0.1,
        idle_release_s=math.inf,
        prefix_keep_s=math.inf,
        num_cells=talk.cells,
    )
    traffic = TrafficTraits(
        arrivals=(),
        longest_prompt=CONTEXT_TOKENS,
        longest_answer=talk.answered[1],
        system_prompts=(),
        salts=(SALT,),
        abort_rate=0.0,
        slow_reader_rate=0.0,
        fork_rate=0.0,
        turn_rate=0.0,
        priority_rate=0.0,
        max_backlog=64,
        late_delivery_rate=0.0,
        fatal_faults=False,
        scoring_rate=0.0,
        pooling_rate=0.0,
        rule_rate=0.0,
    )
    memory = MemoryTraits(0.0, 0.0, 1, 0, 0.0, Manners.NOTHING, True, None, None, True)
    device = DeviceTraits(VOCAB, 1, 0.0, 0.0, step_s=STEP_S / speed, token_s=TOKEN_S / speed)
    return World(engine, memory, device, traffic, pressure_rate=0.0, overlap=True)
