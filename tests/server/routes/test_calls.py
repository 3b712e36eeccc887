"""Tools over HTTP: calls are found in what the model says, or enforced."""

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import SPECIAL_TOKENS, TEMPLATE, XML_TEMPLATE, write_tokenizer
from tests.server.harness import (
    CHAT,
    END,
    Engine,
    chat,
    engine_fixture,
    events,
    ids_of,
    serving,
    token_id,
)
from tests.templates import HYBRID_TEMPLATE

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["a", "b"]}, "times": {"type": "integer"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
WAIT = {"type": "function", "function": {"name": "wait"}}


def hermes(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def xml(name: str, **arguments: Any) -> str:
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


# With room for tools in its prompts, none of which a pause between two requests forgets.
engine = engine_fixture(max_model_len=900, prefix_keep_s=1000.0)


async def answer(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The one choice of a whole answer, which is the same when it is streamed."""
    response = await http.post(CHAT, json=chat(**fields))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    response = await http.post(CHAT, json=chat(stream=True, **fields))
    assert nameless(gathered(events(response.text))) == nameless(choice)
    found: dict[str, Any] = choice
    return found


def gathered(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert set(call) == {"index", "id", "type", "function"}
                message["tool_calls"].append({"function": {"arguments": ""}} | call)
            else:
                assert set(call) == {"index", "function"}
                made = message["tool_calls"][call["index"]]["function"]
                made["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": choice["finish_reason"]}


def nameless(choice: dict[str, Any]) -> Any:
    """What two answers to one request have in common: their ids differ."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"] or "", calls, choice["finish_reason"]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments."""
    calls = choice["message"].get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


# --- calls that a model makes of itself --------------------------------------------------------


async def test_calls_are_found_in_what_the_model_says(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    said = f"Sure.\n{hermes('look', at='a')}\n{hermes('wait')}{END}"
    engine.script[:] = ids_of(tokenizer, said)
    choice = await answer(http, tools=[LOOK, WAIT])
    assert choice["message"]["content"] == "Sure."
    assert calls_of(choice) == [("look", {"at": "a"}), ("wait", {})]
    assert choice["finish_reason"] == "tool_calls"


async def test_thoughts_come_before_calls(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    said = f"<think>\nHm.\n</think>\n\n{hermes('wait')}{END}"
    engine.script[:] = ids_of(tokenizer, said)
    choice = await answer(http, tools=[WAIT])
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == "Hm."
    assert calls_of(choice) == [("wait", {})]


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ("<tool_call>\nno", "<tool_call>\nno"),
        ('<tool_call>\n{"name": "wait", "arguments": [1]}\n</tool_call>', None),
        ('<tool_call>\n{"name": "wait"', None),
    ],
)
async def test_a_malformed_call_is_content(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, said: str, content: str | None
) -> None:
    engine.script[:] = ids_of(tokenizer, said + END)
    choice = await answer(http, tools=[WAIT])
    assert choice["message"]["content"] == (content or said)
    assert (calls_of(choice), choice["finish_reason"]) == ([], "stop")


async def test_a_call_that_is_cut_off_has_what_was_said_of_it(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    said = hermes("look", at="a" * 50)
    engine.script[:] = ids_of(tokenizer, said)
    choice = await answer(http, tools=[LOOK], max_tokens=60)
    (call,) = choice["message"]["tool_calls"]
    assert '{"at": "aaaa'.startswith(call["function"]["arguments"][:12])
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", range(1, 75, 5))
async def test_wherever_an_answer_is_cut_off_a_stream_and_a_whole_answer_are_the_same(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, max_tokens: int
) -> None:
    said = f"So.\n{hermes('look', at='a b')}"
    engine.script[:] = ids_of(tokenizer, said + END)
    choice = await answer(http, tools=[LOOK], max_tokens=max_tokens)
    content = choice["message"]["content"] or ""
    calls = choice["message"].get("tool_calls", [])
    if choice["finish_reason"] == "length":
        assert said.startswith(content)
        assert all('{"at": "a b"}'.startswith(c["function"]["arguments"]) for c in calls)
    else:
        assert choice["finish_reason"] == "tool_calls"
        assert calls_of(choice) == [("look", {"at": "a b"})]


@pytest.mark.parametrize("end", [END, f"</tool_call>{END}"])
async def test_brackets_that_the_model_forgets_are_closed_where_the_call_is(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, end: str
) -> None:
    said = '<tool_call>\n{"name": "look", "arguments": {"at": ["a"'
    engine.script[:] = ids_of(tokenizer, said + end)
    choice = await answer(http, tools=[LOOK])
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"at": ["a"]}'
    assert choice["finish_reason"] == ("stop" if end == END else "tool_calls")


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WAIT], "tool_choice": "none"}])
async def test_nobody_calls_without_tools(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, fields: dict[str, Any]
) -> None:
    engine.script[:] = ids_of(tokenizer, hermes("wait") + END)
    choice = await answer(http, **fields)
    assert choice["message"]["content"] == hermes("wait")
    assert choice["finish_reason"] == "stop"


async def test_an_answer_without_parallel_calls_ends_with_its_first(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, hermes("wait") * 3)
    choice = await answer(http, tools=[WAIT], parallel_tool_calls=False)
    assert calls_of(choice) == [("wait", {})]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("stop", "content", "calls", "finish"),
    [
        ("re.", "Su", [], "stop"),
        ("<tool_call>", "Sure.", [("look", {"at": "a"})], "tool_calls"),
        ("look", "Sure.", [("look", {"at": "a"})], "tool_calls"),
    ],
)
async def test_stop_strings_count_in_what_is_said(
    engine: Engine,
    tokenizer: Tokenizer,
    http: httpx2.AsyncClient,
    stop: str,
    content: str,
    calls: list[Any],
    finish: str,
) -> None:
    engine.script[:] = ids_of(tokenizer, f"Sure.\n{hermes('look', at='a')}{END}")
    choice = await answer(http, tools=[LOOK], stop=stop)
    assert choice["message"]["content"] == content
    assert (calls_of(choice), choice["finish_reason"]) == (calls, finish)


# --- calls that are asked for ------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": LOOK["function"]}])
@pytest.mark.parametrize("seed", range(3))
async def test_a_call_that_is_asked_for_satisfies_its_schema(
    http: httpx2.AsyncClient, choice: Any, seed: int
) -> None:
    asked = {"tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": False}
    drawn = {"temperature": 1, "seed": seed, "thinking_token_budget": 5}
    found = await answer(http, **asked, **drawn, max_tokens=300)
    ((name, arguments),) = calls_of(found)
    assert (name, arguments["at"] in ("a", "b")) == ("look", True)
    assert set(arguments) <= {"at", "times"}
    assert (found["message"]["content"], found["finish_reason"]) == (None, "tool_calls")


async def test_only_what_is_allowed_is_called(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"Well.\n{hermes('look', at='a')}{END}")
    allowed = {"mode": "auto", "tools": [WAIT]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = await answer(http, tools=[LOOK, WAIT], tool_choice=choice, max_tokens=200)
    assert found["message"]["content"] == "Well."
    assert found["message"]["tool_calls"][0]["function"]["name"] == "wait"


async def test_every_choice_has_calls_of_its_own(http: httpx2.AsyncClient) -> None:
    asked: Any = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
    response = await http.post(CHAT, json=chat(**asked, n=3, reasoning_effort="none"))
    choices = response.json()["choices"]
    assert all(calls_of(choice)[0][0] == "look" for choice in choices)
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


async def test_a_schema_that_cannot_be_enforced_is_refused(http: httpx2.AsyncClient) -> None:
    tool = {"name": "f", "strict": True, "parameters": {"properties": {"a": {"contains": {}}}}}
    asked: Any = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    response = await http.post(CHAT, json=chat(**asked))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "contains" in error["message"]


# --- conversations with calls ------------------------------------------------------------------


async def test_a_call_and_its_answer_come_back(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"<think>\nHm.\n</think>\n\n{hermes('wait')}{END}")
    body = chat(tools=[WAIT])
    first = (await http.post(CHAT, json=body)).json()
    message = first["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    body["messages"] += [message, {"role": "tool", "tool_call_id": call_id, "content": "Done."}]
    engine.script[:] = ids_of(tokenizer, "So be it." + END)
    second = (await http.post(CHAT, json=body)).json()
    assert second["choices"][0]["message"]["content"] == "So be it."
    # All of the first prompt and its answer is the beginning of the second one.
    so_far = first["usage"]["total_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert so_far - 16 <= cached <= so_far


@pytest.mark.parametrize("its_id", ["the same", "another"])
async def test_a_call_that_comes_back_in_other_words_is_the_one_that_the_model_wrote(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, its_id: str
) -> None:
    wrote = '<tool_call>{"name":"look","arguments":{"times":3,"at":"a"}}</tool_call>'
    engine.script[:] = ids_of(tokenizer, f"<think>\nHm.\n</think>\n\n{wrote}{END}")
    body = chat(tools=[LOOK])
    first = (await http.post(CHAT, json=body)).json()
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == '{"times":3,"at":"a"}'
    call["function"]["arguments"] = '{ "at": "\\u0061", "times": 3.0 }'
    body["messages"] += [message, {"role": "tool", "tool_call_id": call["id"], "content": "b"}]
    if its_id == "another":
        call["id"] = call["id"][:-1] + "x"
    second = (await http.post(CHAT, json=body)).json()
    so_far = first["usage"]["total_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (so_far - 16 <= cached <= so_far) is (its_id == "the same")


# --- other models ------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [False, True], ids=["plain tags", "special tags"])
@pytest.mark.parametrize(
    ("template", "write"), [(TEMPLATE, hermes), (XML_TEMPLATE, xml)], ids=["hermes", "xml"]
)
async def test_both_formats_are_read_and_enforced_whatever_kind_of_token_tags_are(
    engine: Engine, tmp_path: Path, template: str, write: Any, special: bool
) -> None:
    kinds = {"special": (*SPECIAL_TOKENS, *TAGS), "plain": ()} if special else {}
    write_tokenizer(tmp_path, VOCAB, template=template, **kinds)
    tokenizer = Tokenizer(tmp_path)
    end = frozenset({token_id(tokenizer, END)})
    call = write("look", at="a", times=3)
    async with serving(engine.client, tokenizer, stop_token_ids=end) as (_, http):
        engine.script[:] = ids_of(tokenizer, f"<think>Hm.</think>Sure.\n{call}{END}")
        found = await answer(http, tools=[LOOK])
        assert found["message"]["content"] == "Sure."
        assert found["message"]["reasoning"] == "Hm."
        assert calls_of(found) == [("look", {"at": "a", "times": 3})]
        engine.script.clear()
        asked = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
        found = await answer(http, **asked, temperature=1, seed=5, reasoning_effort="none")
        assert calls_of(found)[0][0] == "look"


async def test_a_model_whose_prompt_opens_its_thoughts_thinks_calls_and_goes_on(
    engine: Engine, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, VOCAB, template=HYBRID_TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    end = frozenset({token_id(tokenizer, END)})
    async with serving(engine.client, tokenizer, stop_token_ids=end) as (_, http):
        said = f"Hm.\n</think>\n\nSure.\n\n{xml('look', at='a', times=3)}{END}"
        engine.script[:] = ids_of(tokenizer, said)
        found = await answer(http, tools=[LOOK])
        assert found["message"]["reasoning"] == "Hm."
        assert found["message"]["content"] == "Sure.\n", "the template takes off what is left"
        assert calls_of(found) == [("look", {"at": "a", "times": 3})]
        body = chat(tools=[LOOK])
        first = (await http.post(CHAT, json=body)).json()
        message = first["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        body["messages"] += [message, {"role": "tool", "tool_call_id": call_id, "content": "b"}]
        engine.script[:] = ids_of(tokenizer, f"Well.\n</think>\n\nSo be it.{END}")
        second = (await http.post(CHAT, json=body)).json()
        assert second["choices"][0]["message"]["content"] == "So be it."
        assert second["choices"][0]["message"]["reasoning"] == "Well."
        # All of the first prompt and its answer is the beginning of the second one.
        so_far = first["usage"]["total_tokens"]
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert so_far - 16 <= cached <= so_far


# --- OpenAI's own client -----------------------------------------------------------------------


async def test_openais_client_reads_calls(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    client = openai.AsyncOpenAI(
        api_key="none",
        base_url="http://localhost/v1",
        http_client=http,
        _strict_response_validation=True,
    )
    said = f"<think>Hm.</think>Sure.\n{hermes('look', at='a')}\n{hermes('wait')}{END}"
    engine.script[:] = ids_of(tokenizer, said)
    asked: Any = {
        "model": "recall",
        "messages": chat()["messages"],
        "tools": [LOOK, WAIT],
        "temperature": 0,
    }
    whole = await client.chat.completions.create(**asked)
    message = whole.choices[0].message
    async with client.chat.completions.stream(**asked) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert streamed.message.content == message.content == "Sure."
    calls = [
        [(call.function.name, call.function.arguments) for call in found or []]
        for found in (streamed.message.tool_calls, message.tool_calls)
    ]
    assert calls[0] == calls[1] == [("look", '{"at": "a"}'), ("wait", "{}")]
