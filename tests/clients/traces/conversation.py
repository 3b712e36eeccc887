"""What a person asks a coding agent, what the model says to it, and what its tools answer.

Five questions of four requests each: three calls of tools and a last word, with thoughts before
each of them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

QUESTIONS = 5
CALLS = 3
TURNS = QUESTIONS * (CALLS + 1)
SYSTEM = """\
You are a coding agent. You work in a folder of a person's machine, with tools, until what they
asked for is done. Read before you change anything; change as little as does the work; run the tests
after every change, and tell at last, in a few lines, what you did and what is left. Never delete a
file that you did not make. Paths are relative to the folder. When a tool fails, say so.
"""
TOOLS: list[dict[str, Any]] = [
    {
        "name": "read_file",
        "description": "The lines of a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "first": {"type": "integer"}},
            "required": ["path"],
        },
    },
    {
        "name": "run",
        "description": "Runs a command and gives what it wrote.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout_s": {"type": "number"}},
            "required": ["command"],
        },
    },
]
SUBJECTS = ("the parser", "the cache", "the command line", "the log", "the tests")


@dataclass(frozen=True, slots=True)
class Step:
    """One request of the agent and its answer."""

    asks: str | None
    """What the person says first; None: the request carries what a tool answered."""
    says: str
    """All that the model generates."""
    tool_answers: str | None
    """What the tool says to the call in it; None: there is none, and the person is next."""


def as_qwen3(call: dict[str, Any]) -> str:
    """How the model's template writes calls, too."""
    return json.dumps(call)


def in_its_own_way(call: dict[str, Any]) -> str:
    """Without the spaces, as other makers train their models."""
    return json.dumps(call, separators=(",", ":"))


def steps(write: Callable[[dict[str, Any]], str] = as_qwen3) -> list[Step]:
    """The conversation. The same each time. write: how the model writes calls."""
    places = [(question, number) for question in range(QUESTIONS) for number in range(CALLS + 1)]
    return [_step(question, number, write) for question, number in places]


def _step(question: int, number: int, write: Callable[[dict[str, Any]], str]) -> Step:
    subject = SUBJECTS[question]
    asks = f"Please look at {subject}: why does case {question + 1} fail?" if number == 0 else None
    thought = (
        f"Step {number + 1} for {subject}. I know what was said so far, and the next thing to find "
        f"out is what line {17 * (question + 1) + number} does."
    )
    thinks = f"<think>\n{thought}\n</think>\n\n"
    if number == CALLS:
        said = f"Case {question + 1} fails in {subject}, since a bound is off by one. I mended it."
        return Step(asks, thinks + said, None)
    call = f"<tool_call>\n{write(_call(question, number))}\n</tool_call>"
    answer = "\n".join(f"{line:4} {subject} {line * 37 % 101}" for line in range(8))
    return Step(asks, f"{thinks}I look at {subject}.\n{call}", answer)


def _call(question: int, number: int) -> dict[str, Any]:
    arguments: dict[str, Any]
    if number % 2 == 0:
        name = "read_file"
        arguments = {"path": f"src/part_{question}.py", "first": 10 * number}
    else:
        name = "run"
        arguments = {"command": f'pytest -k "case {question + 1}"', "timeout_s": 1.5}
    return {"name": name, "arguments": arguments}
