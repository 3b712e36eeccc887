"""Prints what every turn of every agent computed: ``python -m tests.clients.traces``.

1 when a turn computed more than its new tokens and a block, or an answer did not name the place
where a prompt left what was cached.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.traces.agents import (
    Agent,
    ChatAgent,
    MessagesAgent,
    ResponsesAgent,
    as_parts_with_rolling_markers,
    with_a_clock_in_the_newest_question,
    with_a_clock_in_the_system_prompt,
    with_calls_rewritten,
    without_thoughts,
)
from tests.clients.traces.conversation import as_qwen3, in_its_own_way, steps
from tests.clients.traces.replay import Turn, replay, theatre


@dataclass(frozen=True, slots=True)
class Trace:
    """A conversation of an agent and a model."""

    agent: Callable[[], Agent]
    changes: frozenset[str] = frozenset({"thoughts"})
    """What of the history the agent, or the model's template, changes."""
    write: Callable[[dict[str, Any]], str] = as_qwen3
    """How the model writes calls."""


AGENTS = {
    "resends all": Trace(ChatAgent),
    "drops thoughts": Trace(lambda: ChatAgent(without_thoughts)),
    "rewrites calls": Trace(lambda: ChatAgent(with_calls_rewritten)),
    "another model's calls": Trace(ChatAgent, write=in_its_own_way),
    "tells the time first": Trace(
        lambda: ChatAgent(with_a_clock_in_the_system_prompt), frozenset({"the system prompt"})
    ),
    "tells the time last": Trace(
        lambda: ChatAgent(with_a_clock_in_the_newest_question),
        frozenset({"a question", "thoughts"}),
    ),
    "moves cache_control": Trace(lambda: ChatAgent(as_parts_with_rolling_markers)),
    "messages": Trace(MessagesAgent),
    "responses": Trace(ResponsesAgent),
    "responses, stored": Trace(lambda: ResponsesAgent(stored=True)),
}


async def main(names: list[str]) -> int:
    """1 when something was not as it must be."""
    started = time.monotonic()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        async with theatre(Path(folder)) as (stage, http):
            for name in names or AGENTS:
                trace = AGENTS[name]
                said = steps(trace.write)
                turns = await replay(name, trace.agent(), said, stage, http)
                print(report(name, turns), flush=True)
                problems += [f"{name}, {problem}" for problem in problems_of(turns, trace.changes)]
    for problem in problems:
        print(f"NOT AS IT MUST BE: {problem}")
    print(f"{len(names or AGENTS)} agents in {time.monotonic() - started:.0f} s")
    return 1 if problems else 0


def problems_of(turns: list[Turn], expected: Set[str]) -> list[str]:
    """What must not be; expected: what of the history may have changed."""
    found = [(number, turn.problem) for number, turn in enumerate(turns, start=1)]
    found += [
        (number, f"{turn.changed} changed unexpectedly")
        for number, turn in enumerate(turns, start=1)
        if turn.changed is not None and turn.changed not in expected
    ]
    return [f"turn {number}: {problem}" for number, problem in found if problem is not None]


def report(name: str, turns: list[Turn]) -> str:
    """The figures, as lines."""

    def row(title: str, values: list[int]) -> str:
        return f"  {title:9}" + "".join(f"{value:6}" for value in values)

    changes = Counter(turn.changed for turn in turns if turn.changed is not None)
    told = ", ".join(f"{what} in {count} turns" for what, count in changes.items()) or "nothing"
    computed, prompts = sum(turn.computed for turn in turns), sum(turn.prompt for turn in turns)
    return "\n".join(
        [
            f"{name}: {computed} of {prompts} prompt tokens computed; changed: {told}",
            row("prompt", [turn.prompt for turn in turns]),
            row("new", [turn.new for turn in turns]),
            row("computed", [turn.computed for turn in turns]),
        ]
    )


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
