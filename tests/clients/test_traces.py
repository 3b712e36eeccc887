"""The traces find what must not be; a short one passes."""

from pathlib import Path

import pytest

from server.config import Config, LimitsSection
from tests.clients.traces.__main__ import AGENTS, problems_of, report
from tests.clients.traces.agents import ChatAgent, with_calls_rewritten, without_thoughts
from tests.clients.traces.conversation import CALLS, TURNS, in_its_own_way, steps
from tests.clients.traces.replay import Turn, replay, theatre

A_LOOP = CALLS + 1


def test_a_conversation_has_twenty_turns_with_thoughts_and_calls() -> None:
    found = steps()
    assert len(found) == TURNS == 20
    for number, step in enumerate(found):
        assert step.says.startswith("<think>\n")
        assert (step.asks is not None) == (number % A_LOOP == 0)
        assert (step.tool_answers is not None) == ("<tool_call>" in step.says)
        assert (step.tool_answers is not None) == (number % A_LOOP != CALLS)


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


async def test_calls_are_repeated_as_the_model_wrote_them_whatever_the_agent_made_of_them(
    tmp_path: Path,
) -> None:
    async with theatre(tmp_path) as (stage, http):
        agent = ChatAgent(with_calls_rewritten)
        turns = await replay("one", agent, steps(in_its_own_way)[:A_LOOP], stage, http)
    assert problems_of(turns, set()) == []


async def test_an_agent_that_drops_thoughts_computes_what_is_new(tmp_path: Path) -> None:
    async with theatre(tmp_path) as (stage, http):
        agent = ChatAgent(without_thoughts)
        turns = await replay("one", agent, steps()[: A_LOOP + 1], stage, http)
    assert [turn.changed for turn in turns] == [None] * A_LOOP + ["thoughts"]
    assert problems_of(turns, {"thoughts"}) == []


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


def test_every_turn_is_printed() -> None:
    turns = [Turn(900, 900, 900), Turn(1000, 100, 105, "a call")]
    lines = report("one", turns).splitlines()
    assert lines[0] == "one: 1005 of 1900 prompt tokens computed; changed: a call in 1 turns"
    assert lines[3].split() == ["computed", "900", "105"]
    assert len(AGENTS) == 10
