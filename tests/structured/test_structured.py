"""A small, fixed part of ``python -m tests.structured``; and that its judge judges."""

from pathlib import Path

import pytest

from tests.structured.proof import Outcome, Question, call_questions, form_questions, judge, prove
from tests.structured.schemas import TOOLS


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
