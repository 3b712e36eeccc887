"""Moves prefixes between the cache's memory and records in files, behind the engine's steps.

The engine's thread decides and pins memory (a loan); the tier's threads move the bytes::

    waiting prompt -> read loan -> reader threads -> adopted: found as if computed
    hit, system prompt, ended conversation -> due -> write loan -> writer thread -> a record

A prompt waits for a read only as long as that is expected to save time."""

import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from operator import eq

from kvcache.backends.backend import file_checksum as file_checksum
from kvcache.block_hashes import BlockHashes
from kvcache.groups.base import KVGroup, Loan, match_all
from kvcache.groups.full import FullGroup
from kvcache.groups.state import WAYPOINT_TOKENS
from kvcache.sequences import CachedSequence, PromptBoundaries
from kvcache.stats import DiskStats, MissReason
from kvcache.tier.index import Record
from kvcache.tier.store import Fill, ReadResult, RecordStore, WriteFailure
from kvcache.tier.workers import Workers

log = logging.getLogger(__name__)

# A change of what records hold makes all older ones strangers.
FORMAT_VERSION, TAG_BYTES = 1, 16
# The end of a conversation is written once nobody has continued it for this long.
IDLE_END_S = 60.0
# A read may delay a prompt by this part of the time that computing the same tokens takes.
LATE_PART = 0.1
# A read may take this long if it is not known yet how long computing takes.
UNKNOWN_LATE_S = 1.0
# The speed that is assumed before any read is measured, and what each read costs beside.
FIRST_READ_BYTES_PER_S, READ_LATENCY_S = 1e9, 0.005
# The weight of the newest read in the mean speed. After each read that was not begun because
# computing seemed faster, the speed is assumed to be this much higher.
NEWEST_WEIGHT, FORGIVENESS = 0.5, 1.1
# The most records that wait to be written. Beyond it, those of the oldest sequence are forgotten:
# each may keep the hashes of a whole conversation in memory.
MOST_DUE = 8192
# How long to wait before memory that was short is looked at again.
RETRY_S = 0.05
# Seconds between two looks at running transfers: while a prompt or memory waits for one, and later.
BUSY_POLL_S = 0.005
LATE_POLL_S = 1.0
# A rest is looked at again after this long at the latest, because others may have cleared the disk.
LONGEST_REST_S = 60.0
# How long the tier's threads may take to end a transfer before memory is left to the system.
END_LIMIT_S = 5.0
# How long others wait for memory of a transfer before they go on as if it never ended.
TRANSFER_LIMIT_S = 5.0
# How long the only sequence waits for memory of a transfer before it ends with an error.
HUNG_S = 60.0
LOAN_ID = -1


def model_tag(identity: bytes, way: str) -> bytes:
    """Return the tag of a model's records. ``identity`` is of its content and the cache's layout,
    ``way`` of all else on which the bits of K and V depend."""
    parts = FORMAT_VERSION, identity, way
    return sha256(repr(parts).encode()).digest()[:TAG_BYTES]


def tenant_tag(tenant: bytes) -> bytes:
    """Return the tag of the records of a salt's tenant."""
    return sha256(b"tenant" + tenant).digest()[:TAG_BYTES]


@dataclass(slots=True, eq=False)
class DiskRead:
    """Records that are read into memory for one prompt, and for guests with the same beginning."""

    sequence: CachedSequence
    keys: frozenset[bytes]
    """The keys of the records, by which other prompts recognise their own."""
    began_s: float
    tokens: tuple[int, int]
    """The tokens from the first that memory lacks to the position at which a prompt can begin."""
    wanted: dict[int, list[int]]
    """The numbers of records that have no memory yet, by the number of the group."""
    loans: dict[int, Loan] = field(default_factory=dict)
    done: dict[int, set[int]] = field(default_factory=dict)
    outstanding: set[tuple[int, int]] = field(default_factory=set)
    """The group and number of each record that is still to be read."""
    begun: set[tuple[int, int]] = field(default_factory=set)
    """Of which of them a thread may use the memory. The tier's threads add to it."""
    nbytes: int = 0
    """The bytes that were read."""
    given_up_s: float = math.inf
    is_cancelled: bool = False
    is_waited_for: bool = True
    miss: MissReason | None = None


@dataclass(slots=True)
class Wait:
    """What a prompt that is not open yet waits for."""

    read: DiskRead | None = None
    is_guest: bool = False
    """True if the read is that of another prompt."""
    tokens: tuple[int, int] = (0, 0)
    """Those of the prompt that the read brings."""
    deadline_s: float = math.inf
    miss: MissReason | None = None


class DiskTier:
    """The records of one model's cache. Only the engine's thread may call methods."""

    def __init__(
        self,
        store: RecordStore,
        groups: Sequence[KVGroup],
        *,
        tag: bytes,
        tokens_per_block: int,
        prepare: Callable[[], None],
        seconds: Callable[[int, int], float],
        clock: Callable[[], float] = time.monotonic,
        workers: Workers | None = None,
    ) -> None:
        """``prepare`` makes changes of mappings take effect. ``seconds`` returns the time of
        computing tokens [start, end) of a prompt, or 0 if that is not known yet. ``tag`` is that of
        the model."""
        self._store = store
        self._groups = groups
        self._tag = tag
        self._size = tokens_per_block
        self._prepare = prepare
        self._seconds = seconds
        self._clock = clock
        self._workers = Workers(store.refresh) if workers is None else workers
        self._waits: dict[int, Wait] = {}
        """By the ids of prompts."""
        self._running: list[DiskRead] = []
        self._due: OrderedDict[bytes, tuple[int, CachedSequence, int]] = OrderedDict()
        """The group, sequence and block number of records to write, by their keys."""
        self._ends: dict[bytes, tuple[float, CachedSequence, int]] = {}
        """``(due, sequence, position)`` of ends of conversations, by the hash of the last block."""
        self._systems: deque[tuple[float, CachedSequence, int]] = deque()
        """``(due, sequence, position)`` of ends of system prompts."""
        self._open: set[CachedSequence] = set()
        """The sequences that may still fail."""
        self._writing: tuple[KVGroup, Loan] | None = None
        self._writing_since = self._writes_at = 0.0
        self._short_at = -math.inf
        """When memory was short for the last time."""
        self._bytes_per_s = FIRST_READ_BYTES_PER_S
        self._most_written = MOST_DUE
        self._read_bytes = self._written_bytes = self._failures = 0

    # --- reading --------------------------------------------------------------------------------

    def waits(self, seq_id: int, hashes: BlockHashes, boundaries: PromptBoundaries) -> bool:
        """Return True while a prompt waits for records. The first call begins to read them."""
        wait = self._waits.get(seq_id)
        if wait is None or self._has_served(wait):
            sequence = CachedSequence(LOAN_ID, hashes, 0, 0, boundaries)
            wait = self._waits[seq_id] = self._begin(sequence, wait)
        self._leave_if_late(wait)
        return wait.read is not None and wait.read.is_waited_for

    def _leave_if_late(self, wait: Wait) -> None:
        if wait.read is None or not wait.read.is_waited_for:
            return
        reached = min(self._reached(wait.read), wait.tokens[1])
        if self._clock() > wait.deadline_s + self._saved_s(wait, reached):
            self._leave(wait, MissReason.DISK_LATE)

    def forget(self, seq_id: int) -> MissReason | None:
        """Forget a prompt that has begun or ended. Return the reason that less was read."""
        wait = self._waits.pop(seq_id, Wait())
        if wait.read is None:
            return wait.miss
        if wait.read.is_waited_for:
            self._leave(wait, MissReason.DISK_LATE)
            return wait.miss
        return wait.read.miss

    @property
    def recovering(self) -> bool:
        """True if prompts wait for reads, or memory that transfers use will still become free."""
        return self._may_end(TRANSFER_LIMIT_S)

    @property
    def transfers_may_end(self) -> bool:
        """True if the disk reads or writes, and has not done so for very long."""
        return self._may_end(HUNG_S)

    def _may_end(self, limit_s: float) -> bool:
        since = [read.given_up_s for read in self._running]  # later than now: it is waited for
        since += [] if self._writing is None else [self._writing_since]
        return any(self._clock() - each < limit_s for each in since)

    def give_up_reads(self) -> None:
        """Let all prompts go on without records, because memory is short."""
        for read in [read for read in self._running if read.is_waited_for]:
            self._give_up(read, MissReason.DISK_LATE)
        self.note_short()

    def note_short(self) -> None:
        """Note that memory is short: rest between writes, so that what they used becomes free."""
        self._short_at = self._clock()

    def _begin(self, sequence: CachedSequence, before: Wait | None) -> Wait:
        """Begin to read what a prompt lacks, or let it wait for the same reading of another one.
        ``before`` is what the prompt has waited for as a guest."""
        miss = None
        if before is not None and before.read is not None:
            miss = before.read.miss
            if before.read.is_waited_for:
                self._leave(before, None)
        hashes = sequence.block_hashes
        start, _ = match_all(self._groups, hashes, 0)
        position, _ = match_all(self._groups, hashes, 0, lambda *at: self._find(hashes, *at))
        if position <= start:
            return Wait(miss=miss)
        wanted = {}
        for number, group in enumerate(self._groups):
            missing = [n for n in group.needed(position) if not group.has(hashes, n)]
            if missing:
                wanted[number] = missing
        keys = [self._key(hashes.digests[n], number) for number, n in pairs(wanted)]
        tokens, now = (start * self._size, position * self._size), self._clock()
        computing_s = self._seconds(*tokens)
        deadline_s = now + (LATE_PART * computing_s or UNKNOWN_LATE_S)
        if before is not None:
            deadline_s = before.deadline_s + self._saved_s(before, tokens[0])
        waited_for = (read for read in self._running if read.is_waited_for)
        same = next((read for read in waited_for if keys[0] in read.keys), None)
        if same is not None:
            common = sum(map(eq, hashes.digests, same.sequence.block_hashes.digests))
            end = min(tokens[1], same.tokens[1], common * self._size)
            return Wait(same, True, (tokens[0], end), deadline_s)
        if any(now - other.given_up_s > RETRY_S for other in self._running):
            # The disk still uses memory of reads that were given up. More of it may never end.
            return Wait(miss=miss or MissReason.DISK_LATE)
        nbytes = sum(record.nbytes for record in map(self._store.find, keys) if record is not None)
        limit_s = computing_s * (1 if self._is_read_in_order else LATE_PART) - READ_LATENCY_S
        if computing_s and nbytes / self._bytes_per_s > limit_s:
            self._bytes_per_s *= FORGIVENESS if limit_s > 0 else 1
            return Wait(miss=MissReason.DISK_SLOWER)
        self._store.use(keys)
        read = DiskRead(sequence, frozenset(keys), now, tokens, wanted)
        self._running.append(read)
        self._lend_empty(read)
        return Wait(read, False, tokens, deadline_s)

    def _has_served(self, wait: Wait) -> bool:
        """Return True if a guest's read has ended, or has brought all blocks that both share."""
        read = wait.read
        if read is None or not wait.is_guest:
            return False
        return not read.is_waited_for or self._reached(read) >= wait.tokens[1]

    def _saved_s(self, wait: Wait, reached: int) -> float:
        """Return the time of computing that a prompt saves by beginning at this token."""
        return self._seconds(wait.tokens[0], max(reached, wait.tokens[0]))

    def _leave(self, wait: Wait, miss: MissReason | None) -> None:
        """Let a prompt go on with what was read so far. Others may wait for the rest."""
        assert wait.read is not None
        read, wait.read, wait.miss = wait.read, None, miss
        if any(other.read is read for other in self._waits.values()):
            self._adopt(read)
        else:
            self._give_up(read, MissReason.DISK_LATE)

    @property
    def _is_read_in_order(self) -> bool:
        """True if a prompt can begin after any block: what was read has saved computing it."""
        return len(self._groups) == 1 and type(self._groups[0]) is FullGroup

    def _reached(self, read: DiskRead) -> int:
        """Return the position, in tokens, at which prompts can begin if no more is read."""
        start, leading = read.tokens[0], 0
        if self._is_read_in_order and read.loans:
            numbers, done = read.loans[0].numbers, read.done[0]
            leading = next((i for i, n in enumerate(numbers) if n not in done), len(numbers))
        return start + self._size * leading

    def _lend_empty(self, read: DiskRead) -> None:
        """Pin memory for records, and read them. What finds no memory waits for ``update``."""
        for number, missing in list(read.wanted.items()):
            numbers = range(missing[0], missing[-1] + 1)
            loan = self._groups[number].lend_empty(read.sequence, numbers)
            if loan is None:
                continue
            del read.wanted[number]
            read.loans[number], read.done[number] = loan, set()
            read.outstanding |= {(number, n) for n in missing}
            self._prepare()
            for n in missing:
                key = self._key(read.sequence.block_hashes.digests[n], number)
                self._workers.read(partial(self._transfer, read, loan, (number, n), key))

    def _transfer(
        self, read: DiskRead, loan: Loan, at: tuple[int, int], key: bytes
    ) -> Callable[[], None]:
        """Read a record, on another thread. Return what the engine's thread is to do then."""
        result = ReadResult.GONE
        read.begun.add(at)  # before it looks whether the read was given up
        if not read.is_cancelled:
            result = self._store.read(key, lambda fd, _: loan.read(at[1], fd))
        return partial(self._note_read, read, loan, at, result)

    def _note_read(
        self, read: DiskRead, loan: Loan, at: tuple[int, int], result: ReadResult
    ) -> None:
        read.outstanding.discard(at)
        if result is ReadResult.OK:
            read.done[at[0]].add(at[1])
            read.nbytes += loan.nbytes
            self._read_bytes += loan.nbytes
        elif not read.is_cancelled:
            self._failures += 1
            self._give_up(read, MissReason.DISK_FAILED)
        if read.is_cancelled:
            self._cut(read)
        self._finish_if_done(read)

    def _give_up(self, read: DiskRead, miss: MissReason) -> None:
        """Let a prompt go on with what was read. Running transfers end later."""
        read.miss, read.is_cancelled, read.is_waited_for = miss, True, False
        read.given_up_s = self._clock()
        read.wanted.clear()
        read.outstanding &= read.begun
        self._cut(read)
        self._finish_if_done(read)

    def _cut(self, read: DiskRead) -> None:
        """Of a read that was given up, keep what can be shared, and the memory that transfers use:
        they may never end."""
        self._adopt(read)
        for number, loan in list(read.loans.items()):
            used = {n for at, n in read.outstanding if at == number}
            if used:
                end = max(used | loan.adopted) + 1
                read.done[number] = {n for n in read.done[number] if n < end}
                self._groups[number].cut_loan(loan, end)
            else:
                self._groups[number].end_loan(read.loans.pop(number))

    def _adopt(self, read: DiskRead) -> None:
        for number, loan in sorted(read.loans.items()):
            self._groups[number].adopt(loan, sorted(read.done[number] - loan.adopted))

    def _finish_if_done(self, read: DiskRead) -> None:
        if read.outstanding or read.wanted or read not in self._running:
            return
        self._cut(read)
        self._running.remove(read)
        read.is_waited_for = False
        if read.nbytes:  # else it says nothing about the disk: it may have found no memory
            speed = read.nbytes / max(self._clock() - read.began_s, READ_LATENCY_S)
            self._bytes_per_s += NEWEST_WEIGHT * (speed - self._bytes_per_s)

    def _key(self, digest: bytes, number: int) -> bytes:
        """Return the key of a group's record at the end of the block with this hash."""
        return sha256(self._tag + bytes([number]) + digest).digest()

    def _find(self, hashes: BlockHashes, number: int, n: int) -> bool:
        """Return True if a record is in a file alone. One in memory may have too many sharers."""
        if self._groups[number].has(hashes, n):
            return False
        return self._store.find(self._key(hashes.digests[n], number)) is not None

    # --- writing --------------------------------------------------------------------------------

    def note_hit(self, sequence: CachedSequence, position: int) -> None:
        """Note that a prompt begins at ``position``: its rows were worth keeping. The ends of
        conversations that it continues are no ends any more."""
        self._open.add(sequence)
        if sequence.block_hashes.salt.may_be_written:
            for digest in sequence.block_hashes.digests:
                self._ends.pop(digest, None)
            self._write_later(sequence, position, rows_only=True)

    def note_end(self, sequence: CachedSequence) -> None:
        """Note that a sequence ends."""
        self._open.remove(sequence)
        if not (sequence.keeps_prefix and sequence.block_hashes.salt.may_be_written):
            return
        digests, now = sequence.block_hashes.digests, self._clock()
        last = sequence.boundaries.messages_end or sequence.reserved_tokens - 2
        settled = sequence.progress.settled // self._size
        for end in sorted({last // self._size, settled}):
            if 0 < end <= settled:
                self._ends[digests[end - 1]] = now + IDLE_END_S, sequence, end
        if 0 < sequence.system_blocks <= settled:
            # The step that filled the last block may not have completed yet.
            self._systems.append((now + RETRY_S, sequence, sequence.system_blocks))

    def _write_later(self, sequence: CachedSequence, position: int, *, rows_only: bool) -> None:
        for number, group in enumerate(self._groups):
            if rows_only and not isinstance(group, FullGroup):
                continue
            for n in group.needed(position):
                key = self._key(sequence.block_hashes.digests[n], number)
                if self._store.find(key) is None:
                    self._due[key] = number, sequence, n  # of the newest one that needs it
        if len(self._due) > MOST_DUE:
            self._forget_due()

    def _forget_due(self) -> None:
        """Forget records that wait to be written, those of the oldest sequences first, and then the
        last ones: an end without its beginning is of no use."""
        counts = Counter(sequence for _, sequence, _ in self._due.values())
        total, gone = len(self._due), set[CachedSequence]()
        for sequence in sorted(counts, key=lambda each: each.seq_id)[:-1]:
            if total > MOST_DUE * 7 / 8:  # so that this is not done for each further record
                gone.add(sequence)
                total -= counts[sequence]
        due = [(key, item) for key, item in self._due.items() if item[1] not in gone]
        self._due = OrderedDict(due[:MOST_DUE])

    def _take_due(self, now: float) -> None:
        while self._systems and self._systems[0][0] <= now:
            self._write_later(*self._systems.popleft()[1:], rows_only=False)
        for digest in [digest for digest, (due_s, *_) in self._ends.items() if due_s <= now]:
            self._write_later(*self._ends.pop(digest)[1:], rows_only=False)

    def _write(self, now: float) -> None:
        """Begin to write the next batch, unless one is written or the bounds forbid it."""
        if self._writing is not None or now < self._writes_at:
            return
        batch = self._next_batch()[: self._most_written]
        if not batch:
            if self._due:  # a sequence has to end first
                self._writes_at = now + LATE_POLL_S
            return
        number, sequence, _ = self._due[batch[0]]
        group, numbers = self._groups[number], [self._due[key][2] for key in batch]
        loan = group.lend(sequence, numbers)
        if loan is None:
            self._writes_at = now + RETRY_S
            for key in batch:  # others may have what they need
                self._due.move_to_end(key)
            return
        self._prepare()
        self._writing, self._writing_since = (group, loan), now
        records = [
            (self._record(key, number, n, loan), partial(loan.write, n))
            for key, n in zip(batch, numbers, strict=True)
        ]
        self._workers.write(partial(self._write_batch, records))

    def _next_batch(self) -> list[bytes]:
        """Return the keys of records to write together, ascending: of one sequence and group."""
        batch: list[bytes] = []
        first: tuple[int, CachedSequence, int] | None = None
        gone: list[bytes] = []
        doubtful: dict[CachedSequence, float] = {}
        for key, item in self._due.items():
            number, sequence, n = item
            if first is not None and item[:2] != first[:2]:
                break
            if not self._groups[number].has(sequence.block_hashes, n):
                gone.append(key)
                continue
            if sequence not in doubtful:
                doubtful[sequence] = self._first_doubtful(sequence)
            if n >= doubtful[sequence]:
                continue
            first = item
            batch.append(key)
            if len(batch) == self._groups[number].most_lent:
                break
        for key in gone:
            del self._due[key]
        return sorted(batch, key=lambda key: self._due[key][2])

    def _first_doubtful(self, sequence: CachedSequence) -> float:
        """Return the number of a sequence's first block that one which is open has computed, or
        inf. If that one fails, the block and those behind it may be wrong."""
        digests = sequence.block_hashes.digests
        first = math.inf
        for each in self._open:
            n, others = each.first_own, each.block_hashes.digests
            if n is not None and n < min(first, len(digests), len(others)):
                first = n if digests[n] == others[n] else first
        return first

    def _record(self, key: bytes, number: int, n: int, loan: Loan) -> Record:
        end, rows = (n + 1) * self._size, isinstance(self._groups[number], FullGroup)
        saves_s = self._seconds(end - self._size if rows else max(0, end - WAYPOINT_TOKENS), end)
        tenant = tenant_tag(loan.sequence.block_hashes.salt.tenant)
        return Record(key, self._tag, tenant, loan.nbytes, saves_s, end)

    def _write_batch(self, batch: Sequence[tuple[Record, Fill]]) -> Callable[[], None]:
        """Write records, on another thread. Return what the engine's thread is to do then."""
        nbytes = sum(record.nbytes for record, _ in batch)
        if delay_s := self._store.delay_of_write(nbytes):
            if math.isinf(delay_s) and len(batch) > 1:
                return partial(self._note_too_many, len(batch) // 2)
            return partial(self._note_written, [], 0, delay_s)
        result = self._store.write(batch)
        if isinstance(result, WriteFailure):
            log.warning("prefixes are not written to disk: %s", result.reason)
            return partial(self._note_written, [], 0, result.delay_s, failures=1)
        return partial(self._note_written, [record.key for record, _ in batch], result, 0.0)

    def _note_too_many(self, most: int) -> None:
        """Write fewer records together from now on: the bounds never allow so many bytes."""
        self._most_written = most
        self._note_written([], 0, 0.0)

    def _note_written(
        self, keys: list[bytes], nbytes: int, delay_s: float, failures: int = 0
    ) -> None:
        assert self._writing is not None
        group, loan = self._writing
        group.end_loan(loan)
        self._writing = None
        self._failures += failures
        if self._clock() - self._short_at < TRANSFER_LIMIT_S:
            # A batch that follows at once would hide from the scheduler that nothing becomes free.
            delay_s = max(delay_s, LATE_POLL_S)
        if delay_s:
            self._writes_at = self._clock() + min(delay_s, LONGEST_REST_S)
        self._written_bytes += nbytes
        for key in keys:
            self._due.pop(key, None)

    # --- around the steps -----------------------------------------------------------------------

    def update(self) -> None:
        """Take over what the tier's threads have done, and begin what can begin now."""
        self._workers.run_results()
        for read in [read for read in self._running if read.wanted]:
            self._lend_empty(read)
        for wait in self._waits.values():
            self._leave_if_late(wait)
        now = self._clock()
        self._take_due(now)
        self._write(now)

    def poll_s(self) -> float:
        """Return after how many seconds ``update`` has something to do."""
        if self._running or self._writing is not None:
            return BUSY_POLL_S if self.recovering else LATE_POLL_S
        now = self._clock()
        times = [due_s for due_s, *_ in (*self._ends.values(), *self._systems)]
        if self._due:
            times.append(self._writes_at)
        return max(0.0, min(times, default=math.inf) - now)

    def write_ends_now(self) -> None:
        """Let all ends of conversations be due, because the cache ends."""
        self._take_due(math.inf)

    def is_writing(self, until_s: float) -> bool:
        """Return True if records can be written until this time of the clock."""
        return self._writing is not None or bool(self._due and self._writes_at < until_s)

    def stats(self) -> DiskStats:
        return DiskStats(
            held_bytes=self._store.held_bytes,
            limit_bytes=self._store.limits.held,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            failures=self._failures,
            pending_writes=len(self._due) + len(self._ends) + len(self._systems),
            waiting_reads=sum(read.is_waited_for for read in self._running),
        )

    def close(self) -> bool:
        """End all threads. Return False if one still uses the cache's memory."""
        for read in list(self._running):
            self._give_up(read, MissReason.DISK_LATE)
        ended = self._workers.close(END_LIMIT_S)
        if ended:
            with closing(self._store):
                self._workers.run_results()
        return ended


def pairs(numbers: Mapping[int, Iterable[int]]) -> Iterator[tuple[int, int]]:
    """Return each group's number with each number of its records."""
    return ((number, n) for number, each in numbers.items() for n in each)
