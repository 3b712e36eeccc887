"""The traces find what must not be; a short one passes."""

from pathlib import Path

import pytest

from server.config import Config, LimitsSection
from tests.clients.traces.__main__ import problems_of
from tests.clients.traces.agents import ChatAgent, without_thoughts
from tests.clients.traces.conversation import CALLS, steps
from tests.clients.traces.replay import Turn, replay, theatre

A_LOOP = CALLS + 1


async def test_a_loop_of_tools_computes_what_is_new_and_a_question_drops_thoughts(
    tmp_path: Path,
) -> None:
    async with theatre(tmp_path) as (stage, http):
        turns = await replay("one", ChatAgent(), steps()[: A_LOOP + 1], stage, http)
        again = await replay("two", ChatAgent(), steps()[:1], stage, http)
    assert problems_of(turns, {"thoughts"}) == []
    assert [turn.changed for turn in turns] == [None] * A_LOOP + ["thoughts"]
    assert turns[0].computed == turns[0].prompt == again[0].computed
    assert all(turn.computed < turn.prompt / 3 for turn in turns[1:A_LOOP])
    assert turns[A_LOOP].computed > turns[0].prompt / 2, "all of the loop"
    assert problems_of(turns, set()) == ["turn 5: thoughts changed unexpectedly"]


async def test_an_agent_whose_thoughts_nobody_keeps_has_the_places_named(tmp_path: Path) -> None:
    config = Config(limits=LimitsSection(max_thought_bytes=0))
    async with theatre(tmp_path, config) as (stage, http):
        agent = ChatAgent(without_thoughts)
        turns = await replay("one", agent, steps()[:3], stage, http)
    assert [turn.changed for turn in turns] == [None, "thoughts", "thoughts"]
    assert agent.miss is not None
    assert agent.miss["reason"] == "never_cached"
    assert problems_of(turns, {"thoughts"}) == []


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        (Turn(900, 100, 116), None),
        (Turn(900, 100, 117), "117 tokens were computed for 100 new ones"),
        (Turn(900, 100, 99), "1 tokens came from a cache that never had them"),
        (Turn(900, 100, 100, "a call", named=True), None),
        (
            Turn(900, 100, 100, "a call", named=False),
            "a call changed, and the answer did not say where",
        ),
    ],
)
def test_a_turn_that_breaks_its_promise_is_found(turn: Turn, problem: str | None) -> None:
    assert turn.problem == problem
