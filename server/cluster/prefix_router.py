"""Decides which replica a request goes to, by the block hashes of its prompt.

The replica that would answer first is chosen. It is usually the one that holds the longest prefix,
as long as others do not wait there for longer than the rest of the prompt takes elsewhere.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from server.cluster.held_prefixes import HeldPrefixes
from server.cluster.held_states import HeldStates
from server.cluster.replica_loads import Load as Load
from server.cluster.replica_loads import Replica, ReplicaLoads

# So many lengths of prefixes are told apart, the longest ones: each costs a choice some time.
MAX_LENGTHS = 8


class Reason(Enum):
    """Why a replica was chosen."""

    PREFIX = "prefix"
    """None holds more of the prompt."""
    LOAD = "load"
    """Another one holds more of it, and would answer later."""
    NEW = "new"
    """None holds any of it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes."""

    replica: str
    matched_blocks: int
    """Leading blocks of the prompt that the replica holds, as far as is known."""
    reason: Reason


@dataclass(slots=True, eq=False)
class Flight:
    """A request that was sent and has not ended."""

    replica: Replica | None
    """None when it is counted nowhere any more."""
    tokens: int
    """That the replica computes before the first token."""
    new: Sequence[bytes] = ()
    """The hashes of its prompt from which the replica could not go on before."""
    is_answering: bool = False


class PrefixRouter:
    """Weighs what replicas hold of a prompt against the work that waits on them.

    It belongs to one thread. What it knows may be wrong: a replica holds less than is thought, and
    computes more; or more, and a hit is missed. Tenants are apart because their hashes are.
    """

    def __init__(
        self,
        *,
        max_hashes: int,
        block_tokens: int,
        patience_s: float = 0.0,
        keeps_states: bool = False,
    ) -> None:
        """max_hashes: how many are remembered, at about 300 bytes each. block_tokens: that a hash
        stands for. Hashes may be those of every n-th block, as each covers all before it.
        patience_s: a conversation does not leave its replica to be answered sooner by less; needs
        speeds in tokens per second. keeps_states: whether the model goes on from states alone."""
        assert block_tokens > 0
        self._block_tokens = block_tokens
        self._patience_s = patience_s
        self._states = HeldStates(max_hashes) if keeps_states else None
        self._held = HeldPrefixes(max_hashes) if self._states is None else self._states
        self._loads = ReplicaLoads(block_tokens)

    @property
    def num_hashes(self) -> int:
        """Return how many hashes are remembered."""
        return len(self._held)

    # --- what replicas say ----------------------------------------------------------------------

    def set_replicas(self, ids: Collection[str]) -> None:
        """Set which replicas may be chosen. What a removed one held is forgotten: that takes time
        for every hash."""
        if gone := self._loads.set(ids):
            self._held.forget(gone)

    def report_load(self, replica: str, load: Load) -> None:
        """Take over a replica's load. One that is not there (any more) is ignored."""
        if (known := self._loads.get(replica)) is not None:
            self._loads.report(known, load)

    def report_evicted(self, replica: str, hashes: Sequence[bytes]) -> None:
        if (known := self._loads.get(replica)) is not None:
            self._held.discard(hashes, known.number)

    def report_states(self, replica: str, number: int, hashes: Sequence[bytes]) -> None:
        """Take in the hashes after which a replica keeps states: all of them. number: of the
        report, from 1 on."""
        known = self._loads.get(replica)
        if self._states is not None and known is not None:
            self._states.report(hashes, known.number, number)

    # --- requests -------------------------------------------------------------------------------

    def choose(
        self, hashes: Sequence[bytes], tokens: int, *, without: Collection[str] = ()
    ) -> Choice | None:
        """Return where a prompt goes; None when there is no replica.

        hashes: of its full blocks, from the first on. tokens: of the prompt. without: replicas that
        have just refused it.
        """
        among = self._loads.alive
        for name in without:
            among &= ~self._mask(name)
        levels = self._held.find(hashes, among)[-MAX_LENGTHS:]
        hits = [(blocks * self._block_tokens, mask) for blocks, mask in levels]
        number = self._loads.best(tokens, hits, among, self._patience_s)
        if number is None:
            return None
        matched = max((blocks for blocks, mask in levels if mask >> number & 1), default=0)
        longest = levels[-1][0] if levels else 0
        reason = Reason.PREFIX if matched else Reason.NEW
        if matched < longest:
            reason = Reason.LOAD
        return Choice(self._loads.name(number), matched, reason)

    def sent(
        self, replica: str, hashes: Sequence[bytes], tokens: int, ends: Sequence[int] = ()
    ) -> Flight:
        """Count a request that is sent to a replica, which holds its prompt from now on. Return
        what ``started`` and ``finished`` are told. tokens: of the prompt. ends: after how many of
        its blocks states are kept, where the model needs them."""
        known = self._loads.get(replica)
        if known is None:
            return Flight(None, 0)
        found = self._held.find(hashes, 1 << known.number)
        held = found[-1][0] if found else 0
        new, kept = hashes[held:], hashes
        if self._states is not None:
            new = kept = [hashes[end - 1] for end in ends if end > held]
        flight = Flight(known, max(1, tokens - held * self._block_tokens), new)
        self._loads.place(known, flight.tokens)
        self._held.expect(kept, known.number)
        return flight

    def started(self, flight: Flight) -> None:
        """Note a request's first token: its prompt has been computed."""
        if flight.replica is not None and not flight.is_answering:
            self._loads.begin_answer(flight.replica, flight.tokens)
            flight.is_answering = True
            if self._states is not None and not flight.replica.is_gone:
                self._states.add(flight.new, flight.replica.number)

    def finished(self, flight: Flight, hashes: Sequence[bytes] = ()) -> None:
        """Note a request's end, however it ended; a second one says nothing. One that ended before
        its first token is taken for not computed.

        hashes: of prompt and answer, where it is complete: the next prompt of its conversation has
        them.
        """
        replica = flight.replica
        if replica is None:
            return
        was_computed = flight.is_answering
        self.started(flight)
        self._loads.end_answer(replica)
        flight.replica = None
        if not was_computed and not replica.is_gone:
            self._held.discard(flight.new, replica.number)
        if not replica.is_gone:
            # A state is kept at the end alone.
            ended = hashes if self._states is None else hashes[-1:]
            self._held.add(ended, replica.number)

    def _mask(self, name: str) -> int:
        """Return the mask of one replica; 0 where there is none."""
        known = self._loads.get(name)
        return 0 if known is None else 1 << known.number
