"""Statistical replicas: what a machine computes, holds and evicts, without an engine.

What is assumed:

* The model is Qwen3-8B in 4 bits. Memory for K and V is what the planner's rules leave of 16, 24
  and 48 GiB: the GPU's working set, less weights, and 1 GiB for activations and caches.
* Machines are 1, 2 and 4 times as fast as one that computes 250 tokens of prompts per second and
  generates 20. Every speed comes with every memory, in turn.
* Prompts are computed one after the other; each running answer slows them by 4 %. An answer takes
  as long however many run beside it.
* Memory is a least-recently-used set of blocks, the ends of prompts first. A hash stands for 128
  tokens: every 8th block of 16 tokens.
* Conversations come at random, at a share of what the machines could compute if nothing were
  computed twice. They have 2 to 8 turns of 50 to 400 tokens, and one of 40 system prompts of 256 to
  2048 tokens, the n-th in proportion to 1/n. Answers have 50 to 300 tokens, thoughts between turns
  take 20 s on average.
* Replicas report every second, what they evicted as well.

*Possible* hits are those of one cache that holds everything and forgets nothing.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heappop, heappush
from itertools import accumulate, count, cycle, product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from engine.planning.arithmetic import BF16, Q4, kv_bytes_per_token, weights_bytes
from engine.planning.devices import Device, find_device
from engine.planning.shape import read_shape
from engine.types import PrefixNews
from server.cluster.prefix_router import Flight, Load
from tests.cluster.policies import Policy
from tests.models import QWEN3_8B, write_config

GIB = 1024**3
BLOCK_TOKENS = 128
SPEEDS = (1.0, 2.0, 4.0)
MEMORIES_GIB = (16, 24, 48)
PROMPT_TOKENS_PER_S, ANSWER_TOKENS_PER_S = 250.0, 20.0
SLOWED_BY_RUNNING = 0.04
ACTIVATIONS_BYTES = GIB
TURNS, ASKED, ANSWERED = (2, 8), (50, 400), (50, 300)
SYSTEM_PROMPTS, SYSTEM_TOKENS = 40, (256, 2048)
THINKING_S = 20.0
REPORT_S = 1.0


def kv_tokens(memory_gib: int, on: Device) -> int:
    """Tokens of K and V for which a Mac has memory beside the model."""
    with TemporaryDirectory() as folder:
        shape = read_shape(write_config(Path(folder), QWEN3_8B))
    left = on.working_set_bytes(memory_gib * GIB) - weights_bytes(shape, Q4) - ACTIVATIONS_BYTES
    return left // kv_bytes_per_token(shape, BF16)


@dataclass(slots=True)
class StatisticalReplica:
    """A machine."""

    name: str
    speed: float
    memory_gib: int
    blocks: int
    free_at_s: float = 0.0
    waiting: int = 0
    running: int = 0
    evicted: list[bytes] = field(default_factory=list)
    """Not reported yet."""
    requests: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    possible_tokens: int = 0
    _held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    @property
    def held_blocks(self) -> int:
        return len(self._held)

    def find(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks it holds."""
        return next((i for i, its in enumerate(hashes) if its not in self._held), len(hashes))

    def hold(self, hashes: Sequence[bytes]) -> None:
        held = self._held
        for digest in reversed(hashes):
            held[digest] = None
            held.move_to_end(digest)
        while len(held) > self.blocks:
            self.evicted.append(held.popitem(last=False)[0])

    def compute(self, tokens: int, now_s: float) -> float:
        """When a prompt of which so many tokens are new has its first token."""
        slower = 1 + SLOWED_BY_RUNNING * self.running
        took = tokens * slower / (PROMPT_TOKENS_PER_S * self.speed)
        self.free_at_s = max(now_s, self.free_at_s) + took
        return self.free_at_s

    def load(self) -> Load:
        free = self.blocks - len(self._held)
        return Load(self.waiting, self.running, free, self.blocks, self.speed)


def machines(replicas: int) -> list[StatisticalReplica]:
    """Every speed with every memory, in turn."""
    mac = find_device("M4")
    assert mac is not None
    blocks = {gib: kv_tokens(gib, mac) // BLOCK_TOKENS for gib in MEMORIES_GIB}
    kinds = cycle(product(SPEEDS, MEMORIES_GIB))
    return [
        StatisticalReplica(f"replica-{number}", speed, gib, blocks[gib])
        for number, (speed, gib) in zip(range(replicas), kinds, strict=False)
    ]


@dataclass(slots=True)
class Conversation:
    """What was said so far, as hashes: its contents are its number."""

    seed: bytes
    tokens: int
    hashes: list[bytes]
    turns_left: int

    def say(self, tokens: int) -> None:
        self.tokens += tokens
        while len(self.hashes) < self.tokens // BLOCK_TOKENS:
            before = self.hashes[-1] if self.hashes else b""
            self.hashes.append(sha256(before + self.seed).digest())


class Visitors:
    """Draws conversations, turns and pauses."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._numbers = count()
        self._systems = []
        for number in range(SYSTEM_PROMPTS):
            system = Conversation(b"system %d" % number, 0, [], 0)
            system.say(self.random.randint(*SYSTEM_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS)
            self._systems.append(system)
        self._weights = list(accumulate(1 / (1 + number) for number in range(SYSTEM_PROMPTS)))

    def conversation(self) -> Conversation:
        (system,) = self.random.choices(self._systems, cum_weights=self._weights)
        seed, turns = b"%d" % next(self._numbers), self.random.randint(*TURNS)
        return Conversation(seed, system.tokens, [*system.hashes], turns)


def computed_by_best_tokens() -> float:
    """Of a conversation on average, where nothing is computed twice but what is in no full block:
    each turn computes its question, and half a block that prompt and answer before it end in."""
    turns, asked = sum(TURNS) / 2, sum(ASKED) / 2
    return turns * (asked + BLOCK_TOKENS / 2)


@dataclass(slots=True)
class Report:
    """What a run has come to."""

    replicas: list[StatisticalReplica]
    requests: int = 0
    seconds: float = 0.0
    """Until the last conversation has come."""
    begun: int = 0
    """Requests that had a token by then."""
    waits_s: list[float] = field(default_factory=list)
    """Until each first token."""
    router_s: float = 0.0
    """Of real time, in the router."""
    router_hashes: int = 0
    """That it remembers at the end."""

    @property
    def hit_ratio(self) -> float:
        """Of the tokens that could have been cached."""
        return _hit_ratio(self.replicas)

    @property
    def requests_per_s(self) -> float:
        return self.begun / self.seconds

    def wait_s(self, share: float) -> float:
        """What so large a share of requests did not wait longer than."""
        return sorted(self.waits_s)[int(share * (len(self.waits_s) - 1))]

    @property
    def router_us(self) -> float:
        """Of real time in the router, per request: chosen, sent, started, finished."""
        return 1e6 * self.router_s / self.requests

    def kinds(self) -> Iterator["Kind"]:
        """What became of each kind of machine."""
        speed = sum(each.speed for each in self.replicas)
        for kind in product(SPEEDS, MEMORIES_GIB):
            some = [each for each in self.replicas if (each.speed, each.memory_gib) == kind]
            yield Kind(
                *kind,
                sum(each.requests for each in some) / self.requests,
                sum(each.speed for each in some) / speed,
                sum(each.held_blocks for each in some) / sum(each.blocks for each in some),
                _hit_ratio(some),
            )


class Kind(NamedTuple):
    """Machines of one speed and one memory."""

    speed: float
    memory_gib: int
    requests: float
    """Of all requests."""
    of_speed: float
    """Of the speed of all machines."""
    held: float
    """Of their memory, at the end."""
    hit_ratio: float


def _hit_ratio(replicas: Sequence[StatisticalReplica]) -> float:
    cached = sum(each.cached_tokens for each in replicas)
    return cached / max(1, sum(each.possible_tokens for each in replicas))


class StatisticalCluster:
    """Machines, a router and visitors. What happens is written as scripts, which yield pauses."""

    def __init__(
        self,
        replicas: list[StatisticalReplica],
        policy: Policy,
        *,
        conversations: int,
        busy: float,
        seed: int,
    ) -> None:
        """busy: the share of what the machines could compute, if nothing were computed twice."""
        self._replicas = {each.name: each for each in replicas}
        self._policy = policy
        self._visitors = Visitors(seed)
        self._random = self._visitors.random
        self._report = Report(replicas)
        self._seen: set[bytes] = set()
        per_s = PROMPT_TOKENS_PER_S * sum(each.speed for each in replicas)
        self._gap_s = computed_by_best_tokens() / (per_s * busy)
        self._to_come = self._left = conversations
        self._now_s = 0.0
        self._order = count()
        self._due: list[tuple[float, int, Iterator[float]]] = []

    def run(self) -> Report:
        """Until everybody has said everything."""
        self._wake_at(0.0, self._arrive())
        self._wake_at(0.0, self._report_loads())
        while self._due:
            self._now_s, _, script = heappop(self._due)
            pause_s = next(script, None)
            if pause_s is not None:
                self._wake_at(self._now_s + pause_s, script)
        return self._report

    def _wake_at(self, time_s: float, script: Iterator[float]) -> None:
        heappush(self._due, (time_s, next(self._order), script))

    def _arrive(self) -> Iterator[float]:
        while self._to_come:
            self._to_come -= 1
            self._wake_at(self._now_s, self._talk(self._visitors.conversation()))
            self._report.seconds = self._now_s
            yield self._random.expovariate(1 / self._gap_s)

    def _report_loads(self) -> Iterator[float]:
        while self._left:
            for each in self._replicas.values():
                evicted, each.evicted = each.evicted, []
                self._policy.report(each.name, each.load(), PrefixNews(evicted, None))
            yield REPORT_S

    def _talk(self, conversation: Conversation) -> Iterator[float]:
        """A conversation from its first question to its last answer."""
        policy, report, clock = self._policy, self._report, perf_counter
        while conversation.turns_left:
            conversation.turns_left -= 1
            conversation.say(self._random.randint(*ASKED))
            prompt, tokens = conversation.hashes[:], conversation.tokens
            began = clock()
            name = policy.choose(prompt, tokens)
            flight: Flight | None = policy.sent(name, prompt, tokens)
            report.router_s += clock() - began
            replica = self._replicas[name]
            wait_s = self._compute(replica, prompt, tokens)
            yield wait_s
            report.begun += self._to_come > 0
            replica.waiting -= 1
            replica.running += 1
            began = clock()
            policy.started(name, flight)
            report.router_s += clock() - began
            answer = self._random.randint(*ANSWERED)
            yield answer / (ANSWER_TOKENS_PER_S * replica.speed)
            replica.running -= 1
            conversation.say(answer)
            replica.hold(conversation.hashes)
            self._seen.update(conversation.hashes)
            began = clock()
            policy.finished(name, flight, conversation.hashes)
            report.router_s += clock() - began
            if conversation.turns_left:
                yield self._random.expovariate(1 / THINKING_S)
        self._left -= 1

    def _compute(self, replica: StatisticalReplica, prompt: list[bytes], tokens: int) -> float:
        """The seconds until a request's first token; the replica holds its prompt then."""
        cached = replica.find(prompt) * BLOCK_TOKENS
        possible = next((i for i, its in enumerate(prompt) if its not in self._seen), len(prompt))
        first_s = replica.compute(max(1, tokens - cached), self._now_s)
        replica.hold(prompt)
        self._seen.update(prompt)
        replica.waiting += 1
        replica.requests += 1
        replica.cached_tokens += cached
        replica.possible_tokens += possible * BLOCK_TOKENS
        replica.computed_tokens += tokens - cached
        self._report.requests += 1
        self._report.waits_s.append(first_s - self._now_s)
        return first_s - self._now_s
