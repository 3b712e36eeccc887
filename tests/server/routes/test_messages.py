"""Anthropic's API over HTTP."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.types import Request
from server.config import Config, ServerSection
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer
from tests.server.harness import (
    CHAT,
    END,
    Connection,
    Engine,
    chat,
    engine_fixture,
    eventually,
    ids_of,
    own_engine,
    posted,
    serving,
    token_id,
    told,
)

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Grüße", "n": 1.5}}\n</tool_call>'
BILLING = "x-anthropic-billing-header: cc_version=2.1.197; cch={};"
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


def events_of(body: str) -> list[dict[str, Any]]:
    """The data of events that are all named by their type."""
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events."""
    start, *events = [event for event in events if event["type"] != "ping"]
    assert start["type"] == "message_start"
    *blocks, last, stop = events
    assert (last["type"], stop["type"]) == ("message_delta", "message_stop")
    found: dict[str, Any] = start["message"] | last["delta"] | {"usage": last["usage"]}
    written = ""
    for event in blocks:
        if event["type"] == "content_block_start":
            assert event["index"] == len(found["content"])
            found["content"].append(dict(event["content_block"]))
            written = ""
            continue
        block = found["content"][event["index"]]
        if event["type"] == "content_block_stop":
            block |= {"input": json.loads(written)} if block["type"] == "tool_use" else {}
            continue
        delta = event["delta"]
        written += delta.get("partial_json", "")
        for name in ("text", "thinking", "signature"):
            if name in delta:
                block[name] += delta[name]
    return found


def nameless(found: dict[str, Any]) -> Any:
    """What two answers to one request have in common."""
    blocks = [
        {key: value for key, value in block.items() if key != "id"} for block in found["content"]
    ]
    return blocks, found["stop_reason"], found["stop_sequence"], found["usage"]["output_tokens"]


async def answer(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    """A whole answer, which is the same when it is streamed."""
    found = await posted(http, MESSAGES, message(**fields))
    response = await http.post(MESSAGES, json=message(**fields, stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert nameless(added_up(events_of(response.text))) == nameless(found)
    return found


async def error_of(response: httpx2.Response) -> dict[str, str]:
    """The error, which has Anthropic's shape."""
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
    assert body["request_id"] == response.headers["request-id"]
    error: dict[str, str] = body["error"]
    return error


# --- answers ---------------------------------------------------------------------------------


async def test_an_answer_is_a_message(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"<think>\nHm.\n</think>\n\nGrüße!{END}")
    found = await answer(http)
    assert found["id"].startswith("msg_")
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "recall")
    assert found["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "quire"},
        {"type": "text", "text": "Grüße!"},
    ]
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    assert found["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    response = await http.post(f"{MESSAGES}?beta=true", json=message(max_tokens=1))
    assert response.json()["stop_reason"] == "max_tokens"
    assert response.headers["request-id"].startswith("req_")


async def test_tools_are_used(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"Let me look.\n{CALL}\n{CALL}{END}")
    found = await answer(http, tools=[LOOK])
    said, use, again = found["content"]
    assert said == {"type": "text", "text": "Let me look."}
    assert use.keys() == {"type", "id", "name", "input"}
    assert (use["name"], use["input"]) == ("look", {"at": "Grüße", "n": 1.5})
    assert use["id"] != again["id"]
    assert found["stop_reason"] == "tool_use"
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len((await answer(http, tools=[LOOK], tool_choice=one))["content"]) == 2


async def test_a_call_that_is_cut_off_is_text(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, CALL)
    found = await answer(http, tools=[LOOK], max_tokens=50)
    assert CALL.startswith(found["content"][0]["text"])
    assert found["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
async def test_a_tool_that_must_be_used_is(http: httpx2.AsyncClient, choice: Any) -> None:
    asked = choice | {"disable_parallel_tool_use": True}
    schema = {"type": "object", "properties": {"at": {"enum": ["a", "b"]}}, "required": ["at"]}
    tools = [{"name": "look", "input_schema": schema | {"additionalProperties": False}}]
    thinking = {"type": "disabled"}
    found = await answer(http, tools=tools, tool_choice=asked, thinking=thinking, max_tokens=300)
    (use,) = found["content"]
    assert use["input"] in ({"at": "a"}, {"at": "b"})


async def test_an_answer_has_the_form_that_was_asked_for(http: httpx2.AsyncClient) -> None:
    config = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
    found = await answer(http, output_config=config, thinking={"type": "disabled"})
    assert json.loads(found["content"][0]["text"]) in ("yes", "no")


async def test_a_stop_sequence_is_named(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"one two three{END}")
    found = await answer(http, stop_sequences=["three", "two"])
    assert found["content"] == [text("one ")]
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "two")


async def test_a_full_context_is_told(http: httpx2.AsyncClient) -> None:
    found = await answer(http, content="x" * (MAX_LEN - 60), max_tokens=32_000)
    assert found["stop_reason"] == "model_context_window_exceeded"


# --- prompts ---------------------------------------------------------------------------------


async def test_a_resent_conversation_is_the_one_that_a_chat_resends(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    engine.script[:] = ids_of(tokenizer, f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}{END}")
    function = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
    chat: dict[str, Any] = {
        "messages": [{"role": "system", "content": "Be brief."}, *message()["messages"]],
        "tools": [{"type": "function", "function": function}],
        "temperature": 0,
    }
    asked = message(tools=[LOOK], system=[text("Be brief.", **EPHEMERAL)])
    turn = (await http.post(CHAT, json=chat)).json()["choices"][0]["message"]
    found = (await http.post(MESSAGES, json=asked)).json()
    call_id = turn["tool_calls"][0]["id"]
    chat["messages"] += [
        turn,
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "In French."},
    ]
    use_id = found["content"][-1]["id"]
    result = {"type": "tool_result", "tool_use_id": use_id, "content": [text("sunny")]}
    asked["messages"] += [
        {"role": "assistant", "content": found["content"]},
        {"role": "user", "content": [result, text("And now?")]},
        {"role": "system", "content": "In French."},
    ]
    second = (await http.post(CHAT, json=chat)).json()
    answered = (await http.post(MESSAGES, json=asked)).json()
    first_chat, first, second_chat, resent = [request.prompt_ids for request in submitted]
    assert first == first_chat
    assert resent == second_chat
    generated = tuple(engine.script)
    assert resent[: len(first) + len(generated)] == first + generated
    usage = answered["usage"]
    assert sum(usage[name] for name in PROMPT_COUNTS) == len(resent)
    assert second["usage"]["prompt_tokens"] == len(resent)


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
    start, *_, end, _ = events_of(response.text)
    assert counts_of(start["message"]) == counts_of(end) == counts_of({"usage": warm})


@pytest.mark.parametrize("marks", [{}, {"cache_control": None}, {"cache_report": False}])
async def test_who_marks_nothing_reads_the_whole_prompt_as_input(
    http: httpx2.AsyncClient, marks: dict[str, Any]
) -> None:
    asked = message([text("y" * 100)], tools=[LOOK], max_tokens=1) | marks
    cold, warm = [(await http.post(MESSAGES, json=asked)).json() for _ in range(2)]
    assert counts_of(cold) == counts_of(warm) == (cold["usage"]["input_tokens"], 0, 0)
    start, *_, end, _ = events_of((await http.post(MESSAGES, json=asked | {"stream": True})).text)
    assert counts_of(start["message"]) == counts_of(end) == counts_of(cold)
    assert (
        cold["usage"]["input_tokens"]
        == ((await http.post(COUNT, json=asked)).json()["input_tokens"])
    )


def counts_of(body: dict[str, Any]) -> tuple[int, ...]:
    """The counts of the prompt: all, or what the cache did not have; read; written."""
    return tuple(body["usage"][name] for name in PROMPT_COUNTS)


async def test_what_is_billed_and_what_is_marked_changes_no_token(
    http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    bills = [text(BILLING.format(number)) for number in ("1a", "2b")]
    bodies = [
        message([text("Hello")], system=[text("Be brief.")]),
        message([text("Hello", **EPHEMERAL)], system=[bills[0], text("Be brief.", **EPHEMERAL)]),
        message("Hello", system=[bills[1], text("Be brief.")], **EPHEMERAL),
        message("Hello", system=f"{BILLING.format('3c')}\nBe brief.", metadata={"user_id": "x"}),
    ]
    for body in bodies:
        assert (await http.post(MESSAGES, json=body | {"max_tokens": 1})).status_code == 200
        assert (await http.post(COUNT, json=body)).json() == {
            "input_tokens": len(submitted[0].prompt_ids)
        }
    assert len({request.prompt_ids for request in submitted}) == 1
    assert len(submitted) == len(bodies)


async def test_both_kinds_of_key_are_one_tenant_and_another_key_another(
    http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    keys = [{"x-api-key": "a"}, {"authorization": "Bearer a"}, {"x-api-key": "b"}, {}]
    for headers in keys:
        await http.post(MESSAGES, json=message(max_tokens=1), headers=headers)
        await http.post(CHAT, json=chat(max_tokens=1), headers=headers)
    salts = [request.salt for request in submitted]
    assert salts[0::2] == salts[1::2]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 3


async def test_claude_codes_body_is_answered(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"Done.{END}")
    body = message(
        [text("<system-reminder>x</system-reminder>"), text("Hi", **EPHEMERAL)],
        model="recall",
        max_tokens=32_000,
        system=[text(BILLING.format("0")), text("You are."), text("Be brief.", **EPHEMERAL)],
        tools=[
            LOOK | {"eager_input_streaming": True, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": "user_1"},
        stream=True,
    )
    body["messages"].append({"role": "system", "content": "The date is today."})
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "any"}
    response = await http.post(f"{MESSAGES}?beta=true", json=body, headers=headers)
    assert response.status_code == 200
    assert added_up(events_of(response.text))["content"] == [text("Done.")]


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


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (message(max_tokens=None), "max_tokens"),
        ({"messages": message()["messages"]}, "max_tokens"),
        (message(n=2), "n"),
        (message(stop_sequences=[""]), "stop_sequences"),
        (message("x" * MAX_LEN), f"prompt is too long: 1019 tokens > {MAX_LEN - 1} maximum"),
        (message(messages=[{"role": "assistant", "content": "x"}]), "messages"),
        (message(messages=[{"role": "system", "content": ""}]), "messages"),
        (message(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools[0]"),
        (message(output_config={"format": {"type": "json_schema", "schema": {"not": {}}}}), "out"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_done_is_named(
    http: httpx2.AsyncClient, body: dict[str, Any], named: str, stream: bool
) -> None:
    response = await http.post(MESSAGES, json=body | {"stream": stream})
    assert response.status_code == 400
    error = await error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(named)


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


async def test_a_full_queue_is_a_limit_of_rates(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer, closed=True, max_num_seqs=1, max_queue=0) as served:
        engine, app, http = served
        first = Connection(app, MESSAGES, message(max_tokens=2))
        await eventually(lambda: engine.client.in_flight == 1)
        response = await http.post(MESSAGES, json=message())
        assert response.status_code == 429
        assert "retry-after" in response.headers
        assert (await error_of(response))["type"] == "rate_limit_error"
        engine.gate.open()
        await first.end()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_the_engine_is_an_error(tokenizer: Tokenizer, stream: bool) -> None:
    async with own_engine(tokenizer, failing=token_id(tokenizer, "#")) as (engine, _, http):
        engine.script[:] = ids_of(tokenizer, "abc#d")
        response = await http.post(MESSAGES, json=message(stream=stream))
        if stream:
            *_, last = events_of(response.text)
            assert last["type"] == "error"
            error = last["error"]
        else:
            assert response.status_code == 500
            assert response.headers["x-should-retry"] == "false"
            error = await error_of(response)
        assert error["type"] == "api_error"
        assert "a step of the engine failed" in error["message"]


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
    assert added_up(events_of(response.text))["stop_reason"] == "tool_use"


async def test_a_model_without_a_template_cannot_answer(engine: Engine, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    async with serving(engine.client, Tokenizer(tmp_path)) as (_, http):
        for where in (MESSAGES, COUNT):
            response = await http.post(where, json=message())
            assert response.status_code == 400
            assert "template" in (await error_of(response))["message"]
