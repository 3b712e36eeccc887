"""Anthropic's API over HTTP."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from server.config import Config, ServerSection
from server.text.tokenizer import Tokenizer
from tests.api.table import MESSAGES as API
from tests.api.wire import read_named_events
from tests.server.harness import (
    END,
    Engine,
    engine_fixture,
    ids_of,
    own_engine,
    serving,
    token_id,
    told,
)

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
MAX_LEN = 1000


def message(content: Any = "Hello", **fields: Any) -> dict[str, Any]:
    """A greedy request of one message."""
    asked = {"max_tokens": 300, "messages": [{"role": "user", "content": content}]}
    return asked | {"temperature": 0} | fields


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


# With room for tools in its prompts.
engine = engine_fixture(max_model_len=MAX_LEN)


@pytest.fixture
async def http(engine: Engine, tokenizer: Tokenizer) -> AsyncIterator[httpx2.AsyncClient]:
    async with told(engine, tokenizer, max_body_bytes=20_000) as client:
        yield client


async def error_of(response: httpx2.Response) -> dict[str, str]:
    """The error, which has Anthropic's shape."""
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
    assert body["request_id"] == response.headers["request-id"]
    error: dict[str, str] = body["error"]
    return error


# --- prompts ---------------------------------------------------------------------------------


RESULTS = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look"}]},
]


@pytest.mark.parametrize(
    "marks",
    [
        EPHEMERAL,
        {"cache_report": True},
        {"system": [text("What nobody has said before.", **EPHEMERAL)]},
        {"messages": [{"role": "user", "content": [text("y" * 100, **EPHEMERAL)]}]},
        {"tools": [LOOK | EPHEMERAL]},
        {
            "messages": [
                *RESULTS,
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [text("y" * 100, **EPHEMERAL)],
                        }
                    ],
                },
            ]
        },
    ],
)
async def test_what_is_new_in_the_cache_is_counted_apart_for_who_marks_it(
    http: httpx2.AsyncClient, marks: dict[str, Any]
) -> None:
    asked = message("y" * 100, system="What nobody has said before.", max_tokens=1) | marks
    cold, warm = [(await http.post(MESSAGES, json=asked)).json()["usage"] for _ in range(2)]
    tokens = sum(cold[name] for name in PROMPT_COUNTS)
    assert cold["cache_read_input_tokens"] == 0
    assert cold["cache_creation_input_tokens"] == tokens // 16 * 16
    assert sum(warm[name] for name in PROMPT_COUNTS) == tokens
    assert warm["cache_read_input_tokens"] > 90
    assert warm["cache_creation_input_tokens"] <= 16
    response = await http.post(MESSAGES, json=asked | {"stream": True})
    assert response.text.startswith(": waiting"), "the connection lives before the first token"
    start, *_, end, _ = read_named_events(response.text)
    assert counts_of(start["message"]) == counts_of(end) == counts_of({"usage": warm})


@pytest.mark.parametrize("marks", [{}, {"cache_control": None}, {"cache_report": False}])
async def test_who_marks_nothing_reads_the_whole_prompt_as_input(
    http: httpx2.AsyncClient, marks: dict[str, Any]
) -> None:
    asked = message([text("y" * 100)], tools=[LOOK], max_tokens=1) | marks
    cold, warm = [(await http.post(MESSAGES, json=asked)).json() for _ in range(2)]
    assert counts_of(cold) == counts_of(warm) == (cold["usage"]["input_tokens"], 0, 0)
    start, *_, end, _ = read_named_events(
        (await http.post(MESSAGES, json=asked | {"stream": True})).text
    )
    assert counts_of(start["message"]) == counts_of(end) == counts_of(cold)
    assert (
        cold["usage"]["input_tokens"]
        == ((await http.post(COUNT, json=asked)).json()["input_tokens"])
    )


def counts_of(body: dict[str, Any]) -> tuple[int, ...]:
    """The counts of the prompt: all, or what the cache did not have; read; written."""
    return tuple(body["usage"][name] for name in PROMPT_COUNTS)


# --- counts ----------------------------------------------------------------------------------


async def test_tokens_are_counted_without_the_engine(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer, max_model_len=100) as (engine, _, http):
        engine.stop()
        body = message("x" * 500, system="Be brief.", tools=[LOOK])
        response = await http.post(COUNT, json=body)
        assert response.status_code == 200
        assert response.json()["input_tokens"] > 500, "also of what does not fit"
        assert response.headers["request-id"].startswith("req_")
        assert (await http.post(MESSAGES, json=body)).status_code == 503


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chars", [MAX_LEN * n for n in (1, 2, 3, 7, 14)])
async def test_agents_can_read_by_how_much_a_prompt_is_too_long(
    http: httpx2.AsyncClient, chars: int
) -> None:
    # Claude Code reads the numbers with this expression.
    numbers = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
    for tools in ([], [LOOK]):
        error = await error_of(await http.post(MESSAGES, json=message("x" * chars, tools=tools)))
        counted = numbers.match(error["message"])
        assert counted is not None
        assert (chars <= int(counted[1]) <= 1.5 * chars, int(counted[2])) == (True, MAX_LEN - 1)
    wide = LOOK | {"description": "x" * chars}
    error = await error_of(await http.post(MESSAGES, json=message("x", tools=[wide])))
    of_tools = f" > {MAX_LEN - 1} maximum. Of these the definitions of its 1 tools are "
    assert of_tools in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("POST", MESSAGES, "{", 400, "invalid_request_error"),
        ("POST", COUNT, "[]", 400, "invalid_request_error"),
        ("POST", COUNT, json.dumps(message(model="gpt")), 404, "not_found_error"),
        ("POST", MESSAGES, json.dumps(message(model="gpt")), 404, "not_found_error"),
        ("POST", f"{MESSAGES}/batches", "{}", 404, "not_found_error"),
        ("GET", MESSAGES, "", 405, "invalid_request_error"),
        ("POST", MESSAGES, " " * 20_001, 413, "request_too_large"),
    ],
)
async def test_every_error_has_anthropics_shape(
    http: httpx2.AsyncClient, method: str, path: str, content: str, status: int, kind: str
) -> None:
    response = await http.request(method, path, content=content)
    assert response.status_code == status
    assert (await error_of(response))["type"] == kind


# --- what is held back -----------------------------------------------------------------------


async def test_a_call_that_takes_its_time_gets_signs_of_life(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    engine.script[:] = ids_of(tokenizer, CALL + END)
    config = Config(server=ServerSection(sse_ping_s=1e-6))
    end = frozenset({token_id(tokenizer, END)})
    async with serving(engine.client, tokenizer, config, stop_token_ids=end) as (_, http):
        response = await http.post(MESSAGES, json=message(tools=[LOOK], stream=True))
    before, _, _ = response.text.partition("event: content_block_start")
    assert before.count(": waiting") > 10
    assert API.read_stream(response.text).finish == "tool_calls"
