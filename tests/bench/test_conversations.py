"""Conversations of agents on a hybrid's cache: what is computed beside what is new."""

import statistics
from itertools import pairwise
from random import Random

import pytest

from tests.bench import conversations
from tests.bench.conversations import HybridServer, Room, measure, play
from tests.bench.histories import Agent, Script, Sizes, Words, sessions

BLOCK = 64
SIZES = Sizes().shorter(8)
KINDS = list(sessions(Agent(SIZES, Random(1), Words())))
FEW = Room(4, 64 * 1024)
MANY = Room(64, 256 * 1024)


@pytest.mark.parametrize("room", [MANY, FEW], ids=str)
def test_of_20_turns_that_go_on_nothing_but_a_block_is_computed_again(room: Room) -> None:
    account = measure("20 turns, no thoughts", room, SIZES)
    assert len(account.prompts) == 20
    assert max(account.beyond) <= BLOCK
    assert account.copied_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_with_room_nothing_but_a_block_or_an_answer_is_computed_again(kind: str) -> None:
    account = measure(kind, MANY, SIZES)
    assert statistics.median(account.beyond) <= BLOCK
    assert max(account.beyond) <= BLOCK + SIZES.thoughts + 2 * SIZES.answer + BLOCK
    assert account.copied_bytes == 0
    assert account.held_cells <= MANY.cells


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("thoughts dropped", 0.15),
        ("reminders", 0.25),
        ("thoughts not sent", 0.25),
        ("subagents", 0.6),
        ("compactions", 0.35),
    ],
)
def test_with_four_cells_one_conversation_computes_little_again(kind: str, part: float) -> None:
    account = measure(kind, FEW, SIZES)
    assert sum(account.beyond) < part * sum(account.new)
    assert account.evicted_cells


@pytest.mark.parametrize(("kind", "part"), [("two in turn", 0.2), ("one and short ones", 0.3)])
def test_with_eight_cells_two_conversations_compute_little_again(kind: str, part: float) -> None:
    account = measure(kind, Room(8, 128 * 1024), SIZES)
    assert sum(account.beyond) < part * sum(account.new)


def test_what_is_new_is_what_nobody_has_sent_before() -> None:
    words = Words()
    agent = Agent(SIZES, Random(1), words)
    system = agent.system()

    def question() -> Script:
        history = agent.history(system)
        history.user(10)
        yield from history.ask(5)
        history.user(20)
        yield from history.ask(5)

    account = play(HybridServer(MANY, words), [question(), question()])
    # A message has two tokens before and behind it. An answer begins with two, and two for thoughts
    # that an earlier answer has not.
    later = 5 + 2 + 24 + 4
    assert account.new == [len(system) + 14 + 4, 10 + 2 + 4, later, later]


def test_thoughts_are_sent_until_a_person_asks_again() -> None:
    words = Words()
    agent = Agent(SIZES, Random(1), words)
    script = agent.thinking(agent.system(), 2)
    prompts, asked = [], next(script)
    while True:
        prompts.append(asked.prompt)
        try:
            asked = script.send(words.some(asked.answer))
        except StopIteration:
            break
    calls = SIZES.tools + 1
    goes_on = [after[: len(before)] == before for before, after in pairwise(prompts)]
    assert goes_on == [number != calls - 1 for number in range(2 * calls - 1)]


def test_the_table_has_a_line_for_each_kind_and_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversations, "ROOMS", (FEW,))
    conversations.main(["--shorter", "40"])
    told = capsys.readouterr().out
    assert "cells of 61 MiB, 20 KiB of K and V per token in blocks of 64 tokens" in told
    assert all(f"  {kind} " in told for kind in KINDS)
    assert "bytes of K, V and states that were copied: 0" in told
