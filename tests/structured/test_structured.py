"""A small, fixed part of ``python -m tests.structured``; and that its judge judges."""

from pathlib import Path

import pytest

from tests.server.harness import Json
from tests.structured.__main__ import main
from tests.structured.proof import (
    Outcome,
    Question,
    call_questions,
    form_questions,
    invalid,
    joined,
    judge,
    prove,
)
from tests.structured.schemas import SCHEMAS, TOOLS


async def test_a_model_that_says_anything_says_what_twenty_schemas_say(tmp_path: Path) -> None:
    outcome = await prove("json_schema", tmp_path, "hermes", form_questions(40))
    assert outcome.problems == []
    assert outcome.valid == outcome.finished["stop"] == 40
    assert 0 < outcome.streamed < 40
    assert (outcome.thoughts, outcome.twins) == (8, 4)


@pytest.mark.parametrize("tool_format", ["hermes", "xml"])
async def test_calls_that_must_be_made_are_made(tmp_path: Path, tool_format: str) -> None:
    outcome = await prove("calls", tmp_path, tool_format, call_questions(30))
    assert outcome.problems == []
    assert outcome.valid == outcome.finished["tool_calls"] == 30
    assert outcome.calls > 30, "some made several"
    assert (outcome.thoughts, outcome.twins) == (6, 3)


def test_the_whole_proof_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--answers", "2"]) == 0
    told = capsys.readouterr().out
    assert told.count("2 valid of 2 asked") == 3


# --- the judge ---------------------------------------------------------------------------------


def test_there_are_twenty_schemas_and_ten_tools() -> None:
    assert len(SCHEMAS) == 20
    assert len(TOOLS) == 10


@pytest.mark.parametrize("text", ["", "{", '{"a": 1} x', '{"name": 3}', "[]"])
def test_what_is_not_valid_is_found(text: str) -> None:
    assert invalid(text, SCHEMAS["person"]) is not None


def test_answers_that_end_otherwise_are_not_valid() -> None:
    question = Question({}, {"": SCHEMAS["scalar"]}, calls=False)
    assert judge(question, "length", {"content": "1"}, Outcome("")) == (
        "it ends with length: ...'1'"
    )
    assert judge(question, "stop", {"content": "1"}, Outcome("")) is None


@pytest.mark.parametrize(
    ("reason", "calls", "content", "says"),
    [
        ("stop", ["ping"], None, "ends with stop"),
        ("tool_calls", [], None, "0 calls"),
        ("tool_calls", ["ping"], "text", "content: 'text'"),
        ("tool_calls", ["ping", "ping"], None, "2 calls"),
        ("tool_calls", ["pong"], None, "pong may not be called"),
        ("tool_calls", ["greet"], None, "greet: 'name' is a required"),
    ],
)
def test_calls_that_are_not_what_was_asked_for_are_found(
    reason: str, calls: list[str], content: str | None, says: str
) -> None:
    question = Question({}, TOOLS, calls=True, one_call=True)
    made = [{"function": {"name": name, "arguments": "{}"}} for name in calls]
    found = judge(question, reason, {"content": content, "tool_calls": made}, Outcome(""))
    assert found is not None
    assert says in found


def test_a_stream_is_put_together() -> None:
    def chunk(reason: str | None = None, **delta: object) -> Json:
        return {"choices": [{"delta": delta, "finish_reason": reason}]}

    first = {"index": 0, "function": {"name": "ping", "arguments": ""}}
    chunks: list[Json] = [
        chunk(reasoning_content="well"),
        chunk(content="a"),
        chunk(content="b"),
        chunk(tool_calls=[first]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": "}"}}]),
        chunk("tool_calls"),
        {"choices": []},
    ]
    assert joined(chunks) == (
        "tool_calls",
        {
            "content": "ab",
            "reasoning_content": "well",
            "tool_calls": [{"function": {"name": "ping", "arguments": "{}"}}],
        },
    )
