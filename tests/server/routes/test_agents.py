"""What agents send besides messages and functions, at the door of the APIs that they use."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from engine.types import Request
from server.protocol.responses.tools import joined_name
from server.text.tokenizer import Tokenizer
from tests.api.table import MESSAGES as MESSAGES_API
from tests.api.wire import read_named_events
from tests.server.harness import END, Engine, Json, engine_fixture, ids_of, told

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LEFT_OUT = "X-History-Left-Out"
USER, CALL_ID = {"role": "user", "content": "Hello"}, "t1"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}


# With room for tools in its prompts.
engine = engine_fixture(
    max_model_len=3000, model_max_len=3000, kv_budget_bytes=4 << 20, prefix_keep_s=1000.0
)


@dataclass
class Door:
    """A server whose model says what it is told, and what its engine has been asked."""

    engine: Engine
    tokenizer: Tokenizer
    http: httpx2.AsyncClient
    asked: list[Request]

    @property
    def prompt(self) -> str:
        """The newest one."""
        ids = list(self.asked[-1].prompt_ids)
        return self.tokenizer.fast.decode(ids, skip_special_tokens=False)

    @property
    def block_tokens(self) -> int:
        return self.engine.client.limits.shared_block_tokens or 0

    def says(self, text: str) -> None:
        self.engine.script[:] = ids_of(self.tokenizer, text + END)

    async def answer(self, path: str, **body: Any) -> httpx2.Response:
        length = "max_tokens" if path == MESSAGES else "max_output_tokens"
        common = {"temperature": 0, length: 120, "cache_report": True}
        response = await self.http.post(path, json=common | body)
        assert response.status_code == 200, response.text
        return response


@pytest.fixture
async def door(
    engine: Engine, tokenizer: Tokenizer, submitted: list[Request]
) -> AsyncIterator[Door]:
    async with told(engine, tokenizer) as client:
        yield Door(engine, tokenizer, client, submitted)


def call_of(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"at": "a"}}}}\n</tool_call>'


def tool(name: str, **more: Any) -> Json:
    return {"name": name, "description": f"Does {name}.", "input_schema": SCHEMA} | more


def described(name: str) -> str:
    """What the model reads of a tool, in the head or in its place."""
    function = {"name": name, "description": f"Does {name}.", "parameters": SCHEMA}
    return json.dumps({"type": "function", "function": function}) + "\n"


def used(name: str, **given: Any) -> Json:
    block = {"type": "tool_use", "id": CALL_ID, "name": name, "input": given}
    return {"role": "assistant", "content": [block]}


def came(*content: Json) -> Json:
    result = {"type": "tool_result", "tool_use_id": CALL_ID, "content": list(content)}
    return {"role": "user", "content": [result]}


# --- histories -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "heard", "left_out"),
    [
        ({"type": "tool_reference", "tool_name": "find"}, "find\n", None),
        ({"type": "zebra", "text": 5}, "", "zebra=1"),
        ({"type": "tool_removal", "tool": 5}, "", "tool_removal=1"),
    ],
)
async def test_no_block_of_a_history_ends_a_session(
    door: Door, block: Json, heard: str, left_out: str | None
) -> None:
    text = {"type": "text", "text": "And?"}
    places: list[list[Json]] = [
        [{"role": "user", "content": [block, text]}],
        [USER, {"role": "assistant", "content": [block, text]}, USER],
        [USER, {"role": "system", "content": [block, text]}, USER],
        [USER, used("look"), came(block, text)],
    ]
    for messages in places:
        with capture_logs() as entries:
            response = await door.answer(MESSAGES, messages=messages)
        between = "\n\n" if heard and messages[1:2] and messages[1]["role"] == "system" else ""
        assert f"\n{heard}{between}And?<|im_end|>" in door.prompt
        assert response.headers.get(LEFT_OUT) == left_out
        said = [entry.get("history_left_out") for entry in entries if entry["event"] == "request"]
        assert said == [left_out and 1]


# --- tools that a conversation loads ---------------------------------------------------------


def cached(response: httpx2.Response) -> tuple[int, int]:
    """Tokens from the cache, and of the prompt."""
    usage = response.json()["usage"]
    if "input_tokens_details" in usage:
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return usage["cache_read_input_tokens"], sum(usage[name] for name in names)


@pytest.mark.parametrize(
    "loaded",
    [
        came({"type": "tool_reference", "tool_name": "fetch"}),
        came({"type": "text", "text": "Two:\n"}, {"type": "tool_reference", "tool_name": "fetch"}),
        {
            "role": "system",
            "content": [
                {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "fetch"}}
            ],
        },
    ],
)
@pytest.mark.parametrize("names", [("a", "z"), ("g", "h"), ("search", "zoom")])
async def test_the_turn_after_a_search_for_tools_finds_the_whole_turn_before_in_the_cache(
    door: Door, loaded: Json, names: tuple[str, str]
) -> None:
    head = [tool(name) for name in names] + [tool("placeholder", defer_loading=True)]
    talk = [{"role": "user", "content": f"Which of {names} and {loaded}?" + " x" * 99}]
    door.says(call_of(names[0]))
    first = await door.answer(MESSAGES, messages=talk, tools=head)
    late = [tool(name, defer_loading=True) for name in ("fetch", "ask")]
    door.says(call_of("fetch"))
    turn = {"role": "assistant", "content": first.json()["content"]}
    body: Json = {
        "messages": [
            *talk,
            turn,
            json.loads(json.dumps(loaded).replace(CALL_ID, turn["content"][0]["id"])),
        ],
        "tools": sorted([*head, *late], key=lambda one: one["name"]),
    }
    second = await door.answer(MESSAGES, **body)
    prompt = door.prompt
    before = len(door.asked[0].prompt_ids) + len(ids_of(door.tokenizer, call_of(names[0])))
    from_cache, total = cached(second)
    assert from_cache >= before - door.block_tokens
    assert total > before
    assert prompt.count(described("fetch")) == 1
    assert described("ask") not in prompt
    assert prompt.index(described("fetch")) > prompt.index("Which of")
    assert "placeholder" not in prompt
    (call,) = second.json()["content"]
    assert (call["name"], second.json()["stop_reason"]) == ("fetch", "tool_use")
    streamed = MESSAGES_API.read_stream((await door.answer(MESSAGES, **body, stream=True)).text)
    assert [name for name, _ in streamed.calls] == ["fetch"]


async def test_a_deferred_tool_that_must_be_called_is_held_to_its_schema(door: Door) -> None:
    schema = {"type": "object", "properties": {"at": {"enum": ["q"]}}, "required": ["at"]}
    tools = [tool("look"), tool("fetch", input_schema=schema, defer_loading=True)]
    choice = {"type": "tool", "name": "fetch"}
    body = {"messages": [USER], "tools": tools, "tool_choice": choice}
    door.says(call_of("fetch").replace('"a"', '"q"'))
    (call,) = (await door.answer(MESSAGES, **body)).json()["content"]
    assert (call["name"], call["input"]) == ("fetch", {"at": "q"})


@pytest.mark.parametrize(
    ("tools", "shown"),
    [
        ([tool("look", defer_loading=True), tool("fetch", defer_loading=True)], ["look"]),
        ([tool("look", defer_loading=False), tool("fetch", defer_loading=True)], ["look"]),
        (
            [tool("look"), tool("fetch", defer_loading=True), {"type": "tool_search_tool_bm25"}],
            ["look", "fetch"],
        ),
    ],
)
async def test_the_prompt_begins_with_the_tools_that_the_model_cannot_load(
    door: Door, tools: list[Json], shown: list[str]
) -> None:
    await door.answer(MESSAGES, messages=[USER], tools=tools)
    prompt = door.prompt
    assert [name for name in ("look", "fetch") if described(name) in prompt] == shown


@pytest.mark.parametrize(
    ("tools", "name", "is_call"),
    [
        ([tool("look"), tool("other", defer_loading=True)], "fetch", True),
        ([tool("look"), tool("other", defer_loading=True)], "mcp__three__note", True),
        ([tool("look"), tool("other", defer_loading=True)], "other", True),
        ([tool("look"), tool("other", defer_loading=True)], "no name", False),
        ([tool("look"), tool("other", defer_loading=True)], "x" * 129, False),
        ([tool("look"), tool("other")], "fetch", False),
    ],
)
async def test_a_tool_may_be_called_before_it_is_loaded(
    door: Door, tools: list[Json], name: str, is_call: bool
) -> None:
    """Clients that load tools name them to the model before; they answer a call of none."""
    door.says(call_of(name))
    answer = (await door.answer(MESSAGES, messages=[USER], tools=tools)).json()
    assert [block.get("name") for block in answer["content"]] == [name if is_call else None]


async def test_a_tool_that_a_message_defines_is_read_there_and_may_be_called(door: Door) -> None:
    door.says(call_of("fetch"))
    defined = {"type": "tool_definition", "definition": tool("fetch")}
    late: Json = {"role": "system", "content": [{"type": "tool_addition", "tool": defined}]}
    body: Json = {"messages": [USER, late, USER], "tools": [tool("look")]}
    answer = (await door.answer(MESSAGES, **body)).json()
    assert [block["name"] for block in answer["content"]] == ["fetch"]
    prompt = door.prompt
    assert prompt.index(described("fetch")) > prompt.index("Hello")
    late["content"].append({"type": "tool_addition", "tool": defined | {"definition": {}}})
    refused = await door.http.post(MESSAGES, json=body | {"max_tokens": 1})
    assert refused.json()["error"]["message"].startswith("messages[1].content[1].tool.definition")


def function(name: str, **more: Any) -> Json:
    return {
        "type": "function",
        "name": name,
        "description": f"Does {name}.",
        "parameters": SCHEMA,
    } | more


def group(namespace: str, *names: str) -> Json:
    tools = [function(name) for name in names]
    return {"type": "namespace", "name": namespace, "description": "Tools.", "tools": tools}


@pytest.mark.parametrize("kind", ["tool_search_output", "additional_tools"])
@pytest.mark.parametrize("repeats", [False, True])
async def test_tools_of_the_input_are_read_there_may_be_called_and_keep_the_prefix(
    door: Door, kind: str, repeats: bool
) -> None:
    asked = {"role": "user", "content": f"{kind}, {repeats}" + " x" * 99}
    door.says("So.")
    first = await door.answer(RESPONSES, input=[asked], tools=[function("look")])
    door.says(call_of("crm.find"))
    loaded = [function("fetch", defer_loading=True), group("crm", "find")]
    search = {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "x"}}
    output = {"type": kind, "call_id": "c", "tools": loaded}
    tools = [function("fetch", defer_loading=True)] if repeats else []
    body = {
        "input": [asked, *first.json()["output"], search, output, USER],
        "tools": [*tools, function("look")],
    }
    second = await door.answer(RESPONSES, **body)
    prompt = door.prompt
    assert (
        prompt.count(described("fetch"))
        == prompt.count(described("crm.find").replace("Does crm.", "Does "))
        == 1
    )
    from_cache, _ = cached(second)
    assert from_cache >= len(door.asked[0].prompt_ids) - door.block_tokens
    (call,) = second.json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "crm", "find")
    assert [given["name"] for given in second.json()["tools"]] == ["fetch"] * repeats + ["look"]
    follow = {"input": [USER], "previous_response_id": second.json()["id"]}
    door.says(call_of("fetch"))
    third = await door.answer(RESPONSES, **follow, tools=body["tools"])
    assert third.json()["output"][0]["name"] == "fetch"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_search_that_the_client_makes_is_called_and_told_as_one(
    door: Door, stream: bool
) -> None:
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    }
    door.says('<tool_call>\n{"name": "tool_search", "arguments": {"query": "x"}}\n</tool_call>')
    asked = {"input": [USER], "tools": [function("look"), search]}
    answered = await door.answer(RESPONSES, **asked, stream=stream)
    if stream:
        events = read_named_events(answered.text)
        assert not [event for event in events if "arguments" in event["type"]]
        (item,) = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    else:
        (item,) = answered.json()["output"]
        assert answered.json()["tools"][1] == search
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"] == {"query": "x"}
    assert "Searches." in door.prompt
    door.says(call_of("fetch"))
    output = {
        "type": "tool_search_output",
        "call_id": item["call_id"],
        "tools": [function("fetch", defer_loading=True)],
    }
    after = await door.answer(RESPONSES, input=[USER, item, output], tools=asked["tools"])
    assert after.json()["output"][0]["name"] == "fetch"


async def test_a_function_called_as_the_search_is_stays_one(door: Door) -> None:
    door.says(call_of("tool_search"))
    (item,) = (await door.answer(RESPONSES, input=[USER], tools=[function("tool_search")])).json()[
        "output"
    ]
    assert (item["type"], item["name"]) == ("function_call", "tool_search")


# --- namespaces ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        ("multi_agent_v1", "spawn_agent"),
        ("mcp__memory", "read_graph"),
        ("mcp__memory__", "read__graph"),
        ("a.b", "c.d"),
        ("a:b", "c"),
        ("n", "look"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_of_a_namespace_is_called_by_both_of_its_names(
    door: Door, namespace: str, name: str, stream: bool
) -> None:
    choice = {"type": "function", "namespace": namespace, "name": name}
    tools = [function("look"), group(namespace, name, "other"), {"type": "web_search"}]
    body = {"input": [USER], "tools": tools, "tool_choice": choice, "stream": stream}
    door.says(call_of(joined_name(namespace, name)))
    response = await door.answer(RESPONSES, **body)
    if stream:
        events = read_named_events(response.text)
        added = [one["item"] for one in events if one["type"] == "response.output_item.added"]
        assert [(one["namespace"], one["name"]) for one in added] == [(namespace, name)]
        answer = events[-1]["response"]
    else:
        answer = response.json()
    (call,) = answer["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", namespace, name)
    assert answer["tool_choice"] == choice
    assert [given["type"] for given in answer["tools"]] == ["function", "namespace"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Done."}
    door.says("So.")
    history = {"input": [USER, call, output], "tools": tools}
    await door.answer(RESPONSES, **history)
    assert door.asked[-1].prompt_ids[: len(door.asked[0].prompt_ids)] == door.asked[0].prompt_ids
    follow = {"input": [output], "previous_response_id": answer["id"], "tools": tools}
    await door.answer(RESPONSES, **follow)
    assert door.asked[-1].prompt_ids == door.asked[-2].prompt_ids
