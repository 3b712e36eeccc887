"""How long each replica would take until a prompt's first token.

The estimate is ``(tokens that wait + tokens to compute) x seconds per token``, for all replicas at
once: at a thousand of them that costs less than keeping a heap in order. What a choice costs others
is added: those who come behind wait for it, and what is evicted is computed again later. Otherwise
replicas that are all busy give each other's conversations away, and get busier by it.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A running answer adds one row to each step, and a step computes some 32 tokens of prompts in the
# time of that row: with so many answers beside it a prompt takes twice as long.
RUNNING_PER_DOUBLING = 32
# A token that is computed on a replica that is busy for a share b of the time delays those who come
# behind by b / (1 - b) tokens: of waiting times behind a server. Not beyond this share.
MOST_BUSY = 0.8
# Of the newest report, in the share of time.
NEWEST_REPORT_SHARE = 1 / 16
# How often a block that is evicted is asked for again, and computed for that; on average.
EVICTION_REGRET = 1.0
TINY_PRESSURE = 1e-12
# Of the newest request, in the average of what requests need.
NEWEST_SHARE = 1 / 16
SMALLEST_CAPACITY = 8


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica reports of itself, late."""

    waiting: int
    """Requests that have not begun."""
    running: int
    """Requests whose prompt or answer is being computed."""
    free_blocks: int
    """Blocks that hold nothing: neither used, nor cached. None is evicted as long as there are
    some. Those of heaps that are not made yet count."""
    total_blocks: int
    """All that the budget has room for."""
    speed: float
    """Tokens of prompts per second while it computes prompts: not less because it was idle, or
    because it only generated. Any unit that all replicas share will do. 0: not known yet."""


@dataclass(slots=True, eq=False)
class Replica:
    """What is known of one that may be chosen."""

    name: str
    number: int
    is_gone: bool = False
    """Whether it was removed. Its number is another one's then."""
    pending: int = 0
    """Requests of ours without a first token."""
    pending_tokens: int = 0
    """What they have to compute."""
    answering: int = 0
    """Requests of ours behind their first token."""
    others_waiting: int = 0
    """Requests of others, as of the newest report."""
    others_running: int = 0
    busy: float = 0.0
    """The share of the time in which prompts waited lately, by its reports."""


class ReplicaLoads:
    """The replicas by number, and the work that waits on each."""

    def __init__(self, block_tokens: int) -> None:
        self.alive = 0
        """The mask of all replicas."""
        self._block_tokens = block_tokens
        self._by_name: dict[str, Replica] = {}
        self._by_number: dict[int, Replica] = {}
        self._unused: list[int] = []
        """Numbers below the capacity without a replica, the lowest last."""
        self._mean_tokens = 0.0
        """That requests had to compute lately."""
        self._queued: Floats = np.empty(0)
        """Tokens that wait; infinite where there is no replica."""
        self._token_s: Floats = np.empty(0)
        """Seconds per token, running answers included."""
        self._delaying: Floats = np.empty(0)
        """Tokens that a token delays, itself included."""
        self._speed: Floats = np.empty(0)
        self._free_tokens: Floats = np.empty(0)
        """Room that holds nothing: infinite where it is not known."""
        self._total_tokens: Floats = np.empty(0)
        self._placed_tokens: Floats = np.empty(0)
        """Tokens that were placed lately."""

    def __len__(self) -> int:
        """Return how many replicas there are."""
        return len(self._by_name)

    def get(self, name: str) -> Replica | None:
        """Return the replica of that name; None where there is none."""
        return self._by_name.get(name)

    def name(self, number: int) -> str:
        return self._by_number[number].name

    # --- which there are ------------------------------------------------------------------------

    def set(self, names: Collection[str]) -> int:
        """Set which replicas there are. Return the mask of those that are gone: their numbers go to
        others."""
        gone = 0
        for name in self._by_name.keys() - set(names):
            number = self._remove(name)
            gone |= 1 << number
        self.alive &= ~gone
        # In their order, so that the same calls lead to the same choices.
        for name in dict.fromkeys(names):
            if name not in self._by_name:
                self._add(name)
        return gone

    def _remove(self, name: str) -> int:
        replica = self._by_name.pop(name)
        del self._by_number[replica.number]
        number, replica.is_gone = replica.number, True
        self._queued[number] = np.inf
        self._speed[number] = self._placed_tokens[number] = 0.0
        self._unused.append(number)
        self._unused.sort(reverse=True)
        return number

    def _add(self, name: str) -> None:
        known = self._speed[[its.number for its in self._by_name.values()]]
        known = known[known > 0]
        if not self._unused:
            self._grow()
        number = self._unused.pop()
        self._by_name[name] = self._by_number[number] = replica = Replica(name, number)
        self.alive |= 1 << number
        # Until it reports, it is taken for as fast as others.
        self._speed[number] = known.mean() if known.size else 1.0
        self._delaying[number] = 1.0
        self._free_tokens[number] = np.inf
        self._total_tokens[number] = 1.0
        self._placed_tokens[number] = 0.0
        self._weigh(replica)

    def _grow(self) -> None:
        old, new = self._queued.size, max(SMALLEST_CAPACITY, 2 * self._queued.size)

        def longer(values: Floats, fill: float) -> Floats:
            return np.concatenate([values, np.full(new - old, fill)])

        self._queued = longer(self._queued, np.inf)
        self._token_s = longer(self._token_s, 1.0)
        self._delaying = longer(self._delaying, 1.0)
        self._speed = longer(self._speed, 0.0)
        self._free_tokens = longer(self._free_tokens, 0.0)
        self._total_tokens = longer(self._total_tokens, 1.0)
        self._placed_tokens = longer(self._placed_tokens, 0.0)
        self._unused = list(range(new - 1, old - 1, -1))

    # --- what they do ---------------------------------------------------------------------------

    def report(self, replica: Replica, load: Load) -> None:
        """Take over what a replica says. Requests beyond our own are others'."""
        number = replica.number
        others = load.waiting + load.running - replica.pending - replica.answering
        replica.others_waiting = min(max(0, others), load.waiting)
        replica.others_running = max(0, others) - replica.others_waiting
        is_busy = replica.pending > 0 or load.waiting > 0
        replica.busy += NEWEST_REPORT_SHARE * (is_busy - replica.busy)
        self._delaying[number] = 1 / (1 - min(replica.busy, MOST_BUSY))
        if load.speed > 0:
            self._speed[number] = load.speed
        self._free_tokens[number] = load.free_blocks * self._block_tokens
        self._total_tokens[number] = max(1, load.total_blocks) * self._block_tokens
        self._weigh(replica)

    def place(self, replica: Replica, tokens: int) -> None:
        """Count a request that is sent. tokens: what the replica has to compute for it."""
        number = replica.number
        replica.pending += 1
        replica.pending_tokens += tokens
        share = NEWEST_SHARE if self._mean_tokens else 1.0
        self._mean_tokens += share * (tokens - self._mean_tokens)
        self._free_tokens[number] = max(0.0, self._free_tokens[number] - tokens)
        self._placed_tokens[number] += tokens
        if self._placed_tokens[number] > self._total_tokens[number]:
            self._placed_tokens /= 2
        self._weigh(replica)

    def begin_answer(self, replica: Replica, tokens: int) -> None:
        """Count a request's first token: its prompt no longer waits."""
        replica.pending -= 1
        replica.pending_tokens -= tokens
        replica.answering += 1
        self._weigh(replica)

    def end_answer(self, replica: Replica) -> None:
        """Count the end of a request behind its first token."""
        replica.answering -= 1
        self._weigh(replica)

    def _weigh(self, replica: Replica) -> None:
        """Bring what choices are made by up to date."""
        if replica.is_gone:
            return
        number = replica.number
        waiting = replica.others_waiting * self._mean_tokens
        self._queued[number] = replica.pending_tokens + waiting
        running = replica.answering + replica.others_running
        self._token_s[number] = (1 + running / RUNNING_PER_DOUBLING) / self._speed[number]

    # --- which is best --------------------------------------------------------------------------

    def best(
        self, tokens: int, hits: list[tuple[int, int]], among: int, patience_s: float = 0.0
    ) -> int | None:
        """Return the number of the replica with the least estimate; None where there is none. Of
        equals it is the one where the least waits, and then the one with the most memory left.

        tokens: of the prompt. hits: tokens that replicas hold of it, with their mask, rising.
        patience_s: that the longest of these is worth beside its tokens.
        """
        if not among:
            return None
        fresh = np.full(self._queued.size, float(tokens))
        holders = np.zeros(fresh.size, np.bool_)
        for held, mask in hits:
            holders = self._places(mask)
            fresh[holders] = max(1, tokens - held)
        seconds = (self._queued + fresh * self._delaying) * self._token_s
        seconds += self._regret_s(fresh)
        if hits:
            seconds[~holders] += patience_s
        if among != self.alive:
            seconds[~self._places(among)] = np.inf
        tied = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-9))
        if tied.size == 1:
            return int(tied[0])
        waiting_s = self._queued[tied] * self._token_s[tied]
        order = np.lexsort((self._placed_tokens[tied] / self._total_tokens[tied], waiting_s))
        return int(tied[order[0]])

    def _regret_s(self, fresh: Floats) -> Floats:
        """Return how long it takes to compute again what is evicted for a request: somewhere, so at
        the average speed. Where more was placed in less memory, what is evicted is younger, and is
        likelier to be asked for."""
        evicted = np.maximum(fresh - self._free_tokens, 0.0)
        pressure = self._placed_tokens / self._total_tokens
        mean = max(float(pressure.sum()) / len(self), TINY_PRESSURE)
        mean_speed = float(self._speed.sum()) / len(self)
        return np.asarray(evicted * pressure * (EVICTION_REGRET / mean / mean_speed))

    def _places(self, mask: int) -> NDArray[np.bool_]:
        size = self._queued.size
        packed = np.frombuffer(mask.to_bytes(-(-size // 8), "little"), np.uint8)
        return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
