"""How much of everything a run of the benchmark does."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.bench.rounds import Rounds


@dataclass(frozen=True, slots=True)
class Size:
    """Rounds of every part, and what a round is."""

    limit_passes: int
    """Of the probes of the machine."""
    decode: Rounds
    chunk: Rounds
    overhead: Rounds
    constraints: Rounds
    serving: Rounds
    requests_per_stream: int
    servers: Rounds
    turns: Rounds
    three_prompts: Rounds
    three_prompts_peer: Rounds
    interference: Rounds
    prefixes: Rounds
    agents: Rounds
    scaling: Rounds

    def with_rounds(self, most: int) -> "Size":
        """The same with so many rounds wherever there are any, however long they take."""
        changed: dict[str, Any] = {
            field.name: Rounds(most, math.inf)
            for field in fields(self)
            if isinstance(rounds := getattr(self, field.name), Rounds) and rounds.most > 0
        }
        return replace(self, **changed)


QUICK = Size(
    limit_passes=3,
    decode=Rounds(5, 10),
    chunk=Rounds(3, 8),
    overhead=Rounds(1, 30),
    constraints=Rounds(3, 15),
    serving=Rounds(3, 25),
    requests_per_stream=2,
    servers=Rounds(1, 60),
    turns=Rounds(1, 60),
    three_prompts=Rounds(3, 60),
    three_prompts_peer=Rounds(0, 0),
    interference=Rounds(2, 15),
    prefixes=Rounds(3, 10),
    agents=Rounds(1, 15),
    scaling=Rounds(1, 60),
)
FULL = Size(
    limit_passes=10,
    decode=Rounds(25, 60),
    chunk=Rounds(7, 60),
    overhead=Rounds(5, 200),
    constraints=Rounds(9, 90),
    serving=Rounds(15, 240),
    requests_per_stream=4,
    servers=Rounds(5, 900),
    turns=Rounds(3, 900),
    three_prompts=Rounds(7, 240),
    three_prompts_peer=Rounds(2, 240),
    interference=Rounds(7, 180),
    prefixes=Rounds(15, 180),
    agents=Rounds(5, 180),
    scaling=Rounds(5, 600),
)
