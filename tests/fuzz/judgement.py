"""What of a server's behaviour is a finding: bounds on figures that were measured outside of it."""

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 2**20
GAP_FLOOR_S, GAP_FACTOR = 0.25, 3.0
"""A gap is a finding beyond both: the floor, and so many times the longest gap in calm."""
ANSWER_LIMIT_S, BACK_LIMIT_S = 60.0, 20.0
"""For an answer; and behind it for /health and all streams to go on."""
MEMORY_FLOOR_BYTES, MEMORY_FACTOR = 96 * MIB, 16.0
"""What a server may take at the peak: for K, V and arrays, and for each byte of a body."""
KEPT_BYTES = 96 * MIB
SQUARE_FLOOR_S, SQUARE_RATIO = 0.05, 3.3
"""The first of three times must be longer, and each of the next two so many times the last."""
WEATHER = (429, 503)
Problems = dict[str, str]
"""Kinds of findings, each with its figures."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a hostile client was told: no status where the connection ended, or time was over."""

    status: int | None
    seconds: float
    said: bytes = b""
    """The beginning of its body."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the watch saw in a while.

    The longest times without an answer of GET /health, without an event of one of the streams (also
    while it was refused), and in which the watch itself did not run; and the resident memory of the
    server with its children. is_back: whether /health and all streams went on afterwards.
    """

    health_gap_s: float
    stream_gap_s: float
    stream_p99_s: float
    own_gap_s: float
    peak_bytes: int
    last_bytes: int
    is_back: bool = True


def problems(answer: Answer, seen: Figures | None, calm: Figures, body_bytes: int) -> Problems:
    """What must not be. seen: None where the answer came at once, so that nobody looked."""
    found: Problems = {}
    if answer.status is None:
        found["no answer"] = f"after {answer.seconds:.2f} s"
    elif answer.status >= 500 and answer.status not in WEATHER:
        found[f"status {answer.status}"] = repr(answer.said)
    if seen is None:
        return found
    if not seen.is_back:
        found["not back"] = f"within {BACK_LIMIT_S:.0f} s"
    for kind, gap_s, calm_s in (
        ("health gap", seen.health_gap_s, calm.health_gap_s),
        ("stream gap", seen.stream_gap_s, calm.stream_gap_s),
    ):
        # While the watch itself does not run it sees nothing of the server.
        if gap_s - seen.own_gap_s > max(GAP_FLOOR_S, GAP_FACTOR * calm_s):
            found[kind] = f"{gap_s:.2f} s (calm {calm_s:.2f})"
    grown = seen.peak_bytes - calm.last_bytes
    if grown > MEMORY_FLOOR_BYTES + MEMORY_FACTOR * body_bytes:
        found["memory"] = f"+{grown / MIB:.0f} MiB for {body_bytes / MIB:.3f}"
    return found


def is_status(kind: str) -> bool:
    """Whether a kind of finding is the answer itself."""
    return kind.startswith("status")


def squared(times_s: Sequence[float], bound_s: float = 0.0) -> Problems:
    """Whether the last three of the times, each for a double size, grow with the square. bound_s: a
    deadline holds them, up to which they may grow."""
    if len(times_s) < 3 or times_s[-3] < SQUARE_FLOOR_S or times_s[-1] < bound_s:
        return {}
    grows = all(times_s[at] > SQUARE_RATIO * times_s[at - 1] for at in (-1, -2))
    return {"time": " to ".join(f"{one:.2f}" for one in times_s[-3:]) + " s"} if grows else {}


def kept(seen: Figures, calm: Figures) -> Problems:
    """Whether a server has not given back what it took."""
    grown = seen.last_bytes - calm.last_bytes
    return {"memory kept": f"+{grown / MIB:.0f} MiB"} if grown > KEPT_BYTES else {}
