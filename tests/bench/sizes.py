"""How much of everything a run of the benchmark does."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.bench.rounds import Rounds


@dataclass(frozen=True, slots=True)
class SetsWork:
    """What a round of instruction-sets asks of each server."""

    prompts: tuple[int, ...]
    """Their tokens."""
    decode_streams: tuple[int, ...]
    """Beside one."""
    whole_streams: tuple[int, ...]


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
    instruction_sets: Rounds
    sets_work: SetsWork
    memory: Rounds
    memory_tokens: int
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
    instruction_sets=Rounds(1, 60),
    sets_work=SetsWork((252,), (8,), (4,)),
    memory=Rounds(1, 60),
    memory_tokens=4096,
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
    instruction_sets=Rounds(3, 7200),
    sets_work=SetsWork((252, 2048), (2, 4, 8), (1, 4, 8)),
    memory=Rounds(1, 60),
    memory_tokens=32768,
    turns=Rounds(3, 900),
    three_prompts=Rounds(7, 240),
    three_prompts_peer=Rounds(2, 240),
    interference=Rounds(7, 180),
    prefixes=Rounds(15, 180),
    agents=Rounds(5, 180),
    scaling=Rounds(5, 600),
)
