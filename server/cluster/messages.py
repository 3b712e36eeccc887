"""What the front of a cluster and its replicas tell each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from engine.types import EngineLimits, EngineStats, TokenEvent

Numbered = tuple[int, TokenEvent]
"""An event, and the number of the answer to the prompt that it is of."""


class Refusal(Enum):
    """Why a replica does not take a request."""

    FULL = "full"
    """It has no room now."""
    ENDED = "ended"
    """Its engine has ended."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself, from time to time."""

    name: str
    """Which no other replica has had."""
    host: str
    """The name of its machine."""
    limits: EngineLimits
    stats: EngineStats
    capacity: int
    """Requests that may run or wait there at the same time."""
    step_age_s: float
    pressure: int


class Route:
    """What is known of one request where its replica is chosen. Nothing of it is sent: the one who
    asks and the one who chooses share the object, each on a thread of its own."""

    def __init__(
        self,
        hashes: Sequence[bytes] = (),
        tokens: int = 0,
        block_tokens: int = 1,
        without: frozenset[str] = frozenset(),
        target: str | None = None,
        ends: Sequence[int] | None = None,
    ) -> None:
        """hashes: of the prompt's full blocks. tokens: of the prompt. block_tokens: of a block.
        without: replicas that are not to be chosen. target: the only one that may be. ends: after
        how many blocks states will be kept; None where the model goes on from any block."""
        self.hashes = hashes
        self.tokens = tokens
        self.block_tokens = block_tokens
        self.without = without
        self.target = target
        self.ends = ends
        self.replica: str | None = None
        """The one that was chosen last."""
        self.reason = ""
        """Why: a Reason."""
        self.replicas: tuple[str, ...] = ()
        """Those that there were."""
        self.on_started: Callable[[], None] | None = None
        self.on_finished: Callable[[Sequence[bytes]], None] | None = None

    def __reduce__(self) -> tuple[type["Route"], tuple[()]]:
        """Send an empty one."""
        return Route, ()

    def started(self) -> None:
        """Note that the first token is there."""
        if self.on_started is not None:
            self.on_started()

    def finished(self, hashes: Sequence[bytes] = ()) -> None:
        """Note the end, however it came. hashes: of prompt and answer, where that is complete."""
        if self.on_finished is not None:
            self.on_finished(hashes)
