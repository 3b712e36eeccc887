"""The index of records: what its entries say, and how they lie in the file.

An entry is 128 bytes, little-endian: the CRC-32 of the other 124 bytes, the format's version, a
kind, two spare bytes, a time (float64, seconds since 1970), and a record. The first entry of any
later format is as long, and begins with the same two fields.
"""

import math
import struct
import zlib
from dataclasses import astuple, dataclass, field, replace
from enum import IntEnum
from itertools import accumulate

FORMAT = 1
LAYOUT = struct.Struct("<IBBxxd32s16s16sQdQI20x")
HOUR_S = 3600
DAY_S = 24 * HOUR_S
# Bytes written are counted in slots of this length: a bound of an hour holds in any such hour.
SLOT_S = 300
# An index of fewer entries than this is never written anew.
COMPACT_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Record:
    """The bytes of one block or state. A hit saves ``saves_s`` of computing; ``depth`` is the
    position in its sequence, in tokens."""

    key: bytes  # 32
    model: bytes  # 16, which name_model() names
    tenant: bytes  # 16: whose text it is
    nbytes: int
    saves_s: float
    depth: int
    checksum: int = 0  # CRC-32C of the bytes, known once the file is filled


NOTHING = Record(bytes(32), bytes(16), bytes(16), 0, 0.0, 0)


class Kind(IntEnum):
    """What an entry says."""

    ADD = 1  # the record was written at that time
    KEEP = 2  # the record was written earlier; the time is that of its last use
    USE = 3
    REMOVE = 4
    WRITTEN = 5  # the sum of bytes written in the slot that begins at that time


def encode(kind: Kind, time_s: float, record: Record) -> bytes:
    data = LAYOUT.pack(0, FORMAT, kind, time_s, *astuple(record))[4:]
    return zlib.crc32(data).to_bytes(4, "little") + data


def is_whole(data: bytes) -> bool:
    """Tell whether these bytes are an entry of any format."""
    checksum = int.from_bytes(data[:4], "little")
    return len(data) == LAYOUT.size and zlib.crc32(data[4:]) == checksum


def decode(data: bytes) -> tuple[Kind, float, Record] | None:
    """Return None for an entry that is damaged. Raises ValueError for another format."""
    if not is_whole(data):
        return None
    _, version, kind, time_s, *values = LAYOUT.unpack(data)
    if version != FORMAT:
        raise ValueError("the index is of another format")
    return Kind(kind), time_s, Record(*values)


@dataclass(slots=True)
class Books:
    """What all entries together say."""

    records: dict[bytes, Record] = field(default_factory=dict)
    last_use: dict[bytes, float] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    """Bytes by slot of SLOT_S."""
    held_bytes: int = 0
    entries: int = 0

    def take(self, data: bytes) -> int:
        """Take over entries up to the last one that is whole. Return their bytes; what follows was
        never finished. Raises ValueError for another format."""
        ends = range(LAYOUT.size, len(data) + 1, LAYOUT.size)
        entries = [decode(data[end - LAYOUT.size : end]) for end in ends]
        while entries and entries[-1] is None:
            entries.pop()
        self.entries += len(entries)
        for entry in entries:
            if entry is not None:
                self._apply(*entry)
        return len(entries) * LAYOUT.size

    def _apply(self, kind: Kind, time_s: float, record: Record) -> None:
        key = record.key
        if kind is Kind.USE and key in self.records:
            self.last_use[key] = time_s
        if kind in (Kind.ADD, Kind.KEEP, Kind.REMOVE):
            if (old := self.records.pop(key, None)) is not None:
                self.held_bytes -= old.nbytes
            self.last_use.pop(key, None)
        if kind in (Kind.ADD, Kind.KEEP):
            self.last_use[key] = time_s
            self.records[key] = record
            self.held_bytes += record.nbytes
        if kind in (Kind.ADD, Kind.WRITTEN):
            slot = int(time_s // SLOT_S)
            self.written[slot] = self.written.get(slot, 0) + record.nbytes

    def compacted(self, now: float) -> bytes:
        """Return anew(), or nothing if more than half of all entries would be in it."""
        live = len(self.records) + len(self._slots(DAY_S, now))
        return self.anew(now) if self.entries > max(COMPACT_ENTRIES, 2 * live) else b""

    def anew(self, now: float) -> bytes:
        """Return entries that say the same as all until now."""
        sums = [(slot * SLOT_S, nbytes) for slot, nbytes in self._slots(DAY_S, now)]
        counts = [encode(Kind.WRITTEN, at, replace(NOTHING, nbytes=nbytes)) for at, nbytes in sums]
        uses = self.last_use
        return b"".join(
            counts + [encode(Kind.KEEP, uses[key], one) for key, one in self.records.items()]
        )

    def is_ahead(self, now: float) -> bool:
        return max(self.written, default=0) > now // SLOT_S

    def cheapest(self, nbytes: int, now: float) -> list[Record]:
        """Return the records of least worth that hold ``nbytes`` together, or all."""

        def worth(record: Record) -> tuple[float, int]:
            # Seconds saved per byte, divided by the seconds since the last use. A wrong clock may
            # have put that use in the future.
            age_s = abs(now - self.last_use[record.key])
            return record.saves_s / max(1, record.nbytes) / (1 + age_s), -record.depth

        ordered = sorted(self.records.values(), key=worth)
        before = accumulate((one.nbytes for one in ordered), initial=0)
        return [one for one, taken in zip(ordered, before, strict=False) if taken < nbytes]

    def written_within(self, window_s: int, now: float) -> int:
        return sum(nbytes for _, nbytes in self._slots(window_s, now))

    def delay_of_write(self, nbytes: int, window_s: int, limit: int, now: float) -> float:
        """Return the seconds until ``nbytes`` more are within the limit of a window."""
        excess, delay_s = nbytes + self.written_within(window_s, now) - limit, 0.0
        for slot, written in self._slots(window_s, now):
            if excess > 0:
                excess -= written
                delay_s = (slot + 1) * SLOT_S + window_s - now
        return delay_s if excess <= 0 else math.inf

    def _slots(self, window_s: int, now: float) -> list[tuple[int, int]]:
        """Return slots that reach into a window, and their bytes, the oldest first. What a clock
        that was wrong wrote in the future counts as written now, from now on."""
        first, last = int((now - window_s) // SLOT_S), int(now // SLOT_S)
        for slot in [one for one in self.written if one > last]:
            self.written[last] = self.written.get(last, 0) + self.written.pop(slot)
        return sorted(each for each in self.written.items() if each[0] >= first)
