"""Responses over HTTP: what is answered, streamed, stored and continued."""

import json
from typing import Any

import httpx2
import pytest

from engine.types import Submission
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    END,
    MODEL,
    Connection,
    Engine,
    Json,
    engine_fixture,
    eventually,
    ids_of,
    own_engine,
    posted,
    recalled_text,
    serving,
    talk,
    token_id,
    told,
)
from tests.server.routes.test_messages import events_of

RESPONSES = "/v1/responses"
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"enum": ["a", "b"]}},
    "required": ["at"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "name": "look", "parameters": PARAMETERS}
CHAT_LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
TURN = f"<think>\nHm.\n</think>\n\nSure.\n{CALL}"


# With room for tools in its prompts.
engine = engine_fixture(max_model_len=900, prefix_keep_s=1000.0)


@pytest.fixture
def prompts(engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine is asked, from now on."""
    asked: list[str] = []
    submit = engine.client.submit_choices

    def spy(submission: Submission, *args: Any) -> Any:
        ids = list(submission.prompt_ids)
        asked.append(tokenizer.fast.decode(ids, skip_special_tokens=False))
        return submit(submission, *args)

    monkeypatch.setattr(engine.client, "submit_choices", spy)
    return asked


def body(given: Any = "Hello", **fields: Any) -> Json:
    return {"input": given, "temperature": 0} | fields


async def answer(http: httpx2.AsyncClient, given: Any = "Hello", **fields: Any) -> Json:
    """A response, and the same one streamed."""
    found = await posted(http, RESPONSES, body(given, **fields))
    streamed = (await stream(http, given, **fields))[-1]["response"]
    assert nameless(streamed) == nameless(found)
    return found


async def stream(http: httpx2.AsyncClient, given: Any = "Hello", **fields: Any) -> list[Json]:
    response = await http.post(RESPONSES, json=body(given, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def events(text: str) -> list[Json]:
    """The events, which are numbered."""
    found = events_of(text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def nameless(response: Json) -> Any:
    """What two responses to one request have in common: not their ids, and not their luck with the
    cache."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    different = ("id", "created_at", "completed_at", "output", "usage")
    usage = {k: v for k, v in response["usage"].items() if k != "input_tokens_details"}
    return {k: v for k, v in response.items() if k not in different}, output, usage


async def refusal(http: httpx2.AsyncClient, **fields: Any) -> Json:
    error: Json = (await posted(http, RESPONSES, body(**fields), status=400))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def text_of(response: Json) -> str:
    (message,) = [item for item in response["output"] if item["type"] == "message"]
    (part,) = message["content"]
    return str(part["text"])


OPEN_RESPONSES = (
    "completed_at", "presence_penalty", "frequency_penalty", "max_tool_calls", "service_tier",
    "safety_identifier", "prompt_cache_key",
)  # fmt: skip


def says(engine: Engine, tokenizer: Tokenizer, text: str) -> None:
    engine.script[:] = ids_of(tokenizer, text + END)


# --- what is answered ------------------------------------------------------------------------


async def test_the_answer_is_what_the_model_says(
    http: httpx2.AsyncClient, tokenizer: Tokenizer
) -> None:
    ids = (await tokenizer.encode_chat(talk())).ids
    found = await answer(http, max_output_tokens=12)
    assert text_of(found) == recalled_text(tokenizer, ids, 12)
    assert (found["status"], found["model"]) == ("incomplete", MODEL)
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["usage"]["input_tokens"] == len(ids)
    assert found["usage"]["output_tokens"] == 12
    assert found["id"].startswith("resp_")


async def test_a_response_has_all_fields_that_open_responses_asks_for(
    http: httpx2.AsyncClient,
) -> None:
    found = await answer(http, max_output_tokens=1, prompt_cache_key="k", presence_penalty=0.5)
    assert {name: found[name] for name in OPEN_RESPONSES} == {
        "completed_at": None,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.0,
        "max_tool_calls": None,
        "service_tier": "default",
        "safety_identifier": None,
        "prompt_cache_key": "k",
    }


async def test_the_tokens_of_an_input_can_be_counted(http: httpx2.AsyncClient) -> None:
    fields = {"instructions": "Be brief.", "tools": [LOOK]}
    response = await http.post(f"{RESPONSES}/input_tokens", json=body(**fields))
    found = await answer(http, max_output_tokens=1, **fields)
    assert response.json() == {
        "object": "response.input_tokens",
        "input_tokens": found["usage"]["input_tokens"],
    }


async def test_thoughts_text_and_calls_are_items(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    says(engine, tokenizer, TURN)
    found = await answer(http, tools=[LOOK])
    thoughts, message, call = found["output"]
    assert found["status"] == "completed"
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (thoughts["summary"], message["content"][0]["text"]) == ([], "Sure.")
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": "a"})
    assert call["call_id"].startswith("call_")
    assert call["id"].startswith("fc_")
    spent = len("\nHm.\n") + 1
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": spent}


async def test_log_probabilities_are_those_of_the_text(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    says(engine, tokenizer, "<think>\nHm.</think>Yes.")
    include = ["message.output_text.logprobs"]
    found = await answer(http, include=include, top_logprobs=2)
    (part,) = found["output"][1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["Y", "e", "s", "."]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    (part,) = (await answer(http))["output"][1]["content"]
    assert part["logprobs"] == []


async def test_a_call_that_is_asked_for_satisfies_its_schema(http: httpx2.AsyncClient) -> None:
    choice = {"type": "function", "name": "look"}
    found = await answer(http, tools=[{"type": "web_search"}, LOOK], tool_choice=choice)
    (call,) = found["output"]
    assert json.loads(call["arguments"]) in ({"at": "a"}, {"at": "b"})
    assert (found["tool_choice"], len(found["tools"])) == (choice, 1)


async def test_the_format_is_enforced(http: httpx2.AsyncClient) -> None:
    form = {"type": "json_schema", "name": "place", "schema": PARAMETERS}
    found = await answer(http, text={"format": form})
    assert json.loads(text_of(found)) in ({"at": "a"}, {"at": "b"})


# --- streams ---------------------------------------------------------------------------------


async def test_a_stream_says_the_same_piece_by_piece_and_has_no_other_end(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    says(engine, tokenizer, TURN)
    found = await stream(http, tools=[LOOK])
    deltas: dict[str, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            deltas[event["type"]] = deltas.get(event["type"], "") + event["delta"]
    assert deltas["response.reasoning_text.delta"] == "Hm."
    assert deltas["response.output_text.delta"] == "Sure."
    assert json.loads(deltas["response.function_call_arguments.delta"]) == {"at": "a"}
    assert found[-1]["type"] == "response.completed"
    raw = await http.post(RESPONSES, json=body(stream=True, max_output_tokens=1))
    assert b"[DONE]" not in raw.content


@pytest.mark.parametrize("as_stream", [True, False])
async def test_a_fault_of_the_engine_is_a_failed_response(
    tokenizer: Tokenizer, as_stream: bool
) -> None:
    async with own_engine(tokenizer, failing=ids_of(tokenizer, "Z")[0]) as (_, _, http):
        if not as_stream:
            whole = await http.post(RESPONSES, json=body("Z"))
            assert whole.status_code == 500
            assert whole.json()["error"]["type"] == "server_error"
            return
        last = (await stream(http, "Z"))[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        gone = await http.get(f"{RESPONSES}/{last['response']['id']}")
        assert gone.status_code == 404


# --- the same prompt -------------------------------------------------------------------------


async def test_what_is_sent_back_makes_the_prompt_that_a_chat_would(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, prompts: list[str]
) -> None:
    says(engine, tokenizer, TURN)
    items: list[Json] = [{"role": "developer", "content": "Brief."}]
    items += [{"role": "user", "content": "Hello"}]
    messages: list[Json] = [*items]
    system = {"role": "system", "content": "Be good."}
    said = {"instructions": system["content"], "tools": [LOOK]}

    async def both() -> None:
        found = await http.post(RESPONSES, json=body(items, **said))
        chat = {"messages": [system, *messages], "temperature": 0, "tools": [CHAT_LOOK]}
        message = (await http.post(CHAT, json=chat)).json()["choices"][0]["message"]
        items.extend(found.json()["output"])
        messages.append(message)

    await both()
    call_id = items[-1]["call_id"]
    items.append({"type": "function_call_output", "call_id": call_id, "output": "sunny"})
    messages.append({"role": "tool", "tool_call_id": call_id, "content": "sunny"})
    await both()
    items.append({"role": "user", "content": "And now?"})
    messages.append({"role": "user", "content": "And now?"})
    await both()
    first, chat_first, second, chat_second, third, chat_third = prompts
    assert (first, second, third) == (chat_first, chat_second, chat_third)
    assert second.startswith(first + TURN + END)
    assert third.startswith(second + TURN + END)


@pytest.mark.parametrize("how", ["resent", "stored", "referred to", "packed", "streamed"])
async def test_a_conversation_goes_on_from_the_same_prompt_however_it_is_sent(
    engine: Engine,
    tokenizer: Tokenizer,
    http: httpx2.AsyncClient,
    prompts: list[str],
    how: str,
) -> None:
    says(engine, tokenizer, TURN)
    fields: Json = {"tools": [LOOK], "include": ["reasoning.encrypted_content"]}
    if how == "streamed":
        first = (await stream(http, "Hello", **fields))[-1]["response"]
    else:
        first = (await http.post(RESPONSES, json=body(**fields))).json()
    output = first["output"]
    heard = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "sunny"}
    if how in ("stored", "streamed"):
        fields |= {"previous_response_id": first["id"], "input": [heard]}
    elif how == "referred to":
        references = [{"type": "item_reference", "id": item["id"]} for item in output]
        fields["input"] = [{"role": "user", "content": "Hello"}, *references, heard]
    else:
        if how == "packed":
            output[0].pop("content")
        fields["input"] = [{"role": "user", "content": "Hello"}, *output, heard]
    response = await http.post(RESPONSES, json=body(**fields))
    assert response.status_code == 200, response.text
    heard_text = f"\n<|im_start|>tool\nsunny{END}\n<|im_start|>assistant\n"
    assert prompts[1] == prompts[0] + TURN + END + heard_text
    assert response.json()["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_instructions_are_not_taken_over(
    http: httpx2.AsyncClient, prompts: list[str]
) -> None:
    fields: Json = {"max_output_tokens": 2}
    first = (await http.post(RESPONSES, json=body(instructions="Rhyme.", **fields))).json()
    again = body("More", previous_response_id=first["id"], instructions="Sing.", **fields)
    second = (await http.post(RESPONSES, json=again)).json()
    await http.post(RESPONSES, json=body("End", previous_response_id=second["id"], **fields))
    assert "Rhyme." in prompts[0]
    assert "Rhyme." not in prompts[1]
    assert "Sing." in prompts[1]
    assert "Sing." not in prompts[2]
    for text in ("Hello", text_of(first), "More", text_of(second), "End"):
        assert text in prompts[2]


# --- the store -------------------------------------------------------------------------------


async def test_a_stored_response_can_be_asked_for_and_deleted(http: httpx2.AsyncClient) -> None:
    first = (await http.post(RESPONSES, json=body(max_output_tokens=2))).json()
    path = f"{RESPONSES}/{first['id']}"
    assert (await http.get(path)).json() == first
    assert (await http.delete(path)).json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    for method, at in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
        gone = await http.request(method, at)
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "response_not_found"


async def test_a_key_reads_nothing_of_another_keys(http: httpx2.AsyncClient) -> None:
    mine, yours = ({"Authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    found = (await http.post(RESPONSES, json=body(max_output_tokens=2), headers=mine)).json()
    path, item = f"{RESPONSES}/{found['id']}", found["output"][0]["id"]
    continued = body(previous_response_id=found["id"], max_output_tokens=1)
    referring = body([{"id": item}], max_output_tokens=1)
    for headers, status in ((yours, 400), ({}, 400), (mine, 200)):
        for asked in (continued, referring):
            response = await http.post(RESPONSES, json=asked, headers=headers)
            assert response.status_code == status
    for headers in (yours, {}):
        assert (await http.get(path, headers=headers)).status_code == 404
        assert (await http.delete(path, headers=headers)).status_code == 404
    assert (await http.get(path, headers=mine)).json() == found


async def test_what_is_not_stored_cannot_be_continued(http: httpx2.AsyncClient) -> None:
    asked = body(max_output_tokens=1, store=False)
    found = (await http.post(RESPONSES, json=asked)).json()
    assert found["store"] is False
    assert (await http.get(f"{RESPONSES}/{found['id']}")).status_code == 404
    for unknown in (found["id"], "resp_none", ""):
        error = await refusal(http, previous_response_id=unknown)
        assert error["param"] == "previous_response_id"
        assert error["code"] == "previous_response_not_found"
        assert "as input" in error["message"]


async def test_only_so_many_responses_are_stored(engine: Engine, tokenizer: Tokenizer) -> None:
    async with told(engine, tokenizer, max_stored_response_bytes=100) as http:
        found = await http.post(RESPONSES, json=body(max_output_tokens=1))
        assert (await http.get(f"{RESPONSES}/{found.json()['id']}")).status_code == 404


async def test_a_stream_whose_client_has_left_is_not_stored(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    end = frozenset({token_id(tokenizer, END)})
    engine.script.clear()
    engine.gate.closed = True
    async with serving(engine.client, tokenizer, stop_token_ids=end) as (app, http):
        connection = Connection(app, RESPONSES, body(stream=True))
        await connection.begins()
        created = json.loads(connection.body.decode().split("data: ")[1].split("\n")[0])
        connection.leave()
        await connection.end()
        engine.gate.open()
        await eventually(lambda: engine.client.in_flight == 0)
        gone = await http.get(f"{RESPONSES}/{created['response']['id']}")
        assert gone.status_code == 404


async def test_the_items_of_a_request_are_listed(http: httpx2.AsyncClient) -> None:
    given = [{"role": "user", "content": f"{number}", "id": f"msg_{number}"} for number in range(4)]
    asked = body([*given, {"role": "user", "content": "last"}], max_output_tokens=1)
    found = (await http.post(RESPONSES, json=asked)).json()
    path = f"{RESPONSES}/{found['id']}/input_items"

    async def listed(**query: Any) -> tuple[list[str], bool]:
        page = (await http.get(path, params=query)).json()
        names = [item["id"] for item in page["data"]]
        assert (page["object"], page["first_id"]) == ("list", names[0] if names else "")
        assert page["last_id"] == (names[-1] if names else "")
        return [item["content"][0]["text"] for item in page["data"]], page["has_more"]

    assert await listed() == (["last", "3", "2", "1", "0"], False)
    assert await listed(order="asc", limit=2) == (["0", "1"], True)
    assert await listed(order="asc", limit=2, after="msg_1") == (["2", "3"], True)
    assert await listed(limit=100, after="msg_1") == (["0"], False)
    assert await listed(after="msg_0") == ([], False)
    for query in (
        {"limit": "0"},
        {"limit": "101"},
        {"limit": "x"},
        {"order": "up"},
        {"after": "x"},
    ):
        refused = await http.get(path, params=query)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] in query


async def test_a_stored_response_is_not_streamed(http: httpx2.AsyncClient) -> None:
    response = await http.get(f"{RESPONSES}/resp_1", params={"stream": "true"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream"


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "robot"}]}, "input[0].role"),
        ({"input": "x" * 5000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        (
            {"text": {"format": {"type": "json_schema", "strict": True, "schema": {"$ref": "x"}}}},
            "text.format.schema",
        ),
    ],
)
async def test_bad_input_is_refused_with_the_name_of_its_parameter(
    http: httpx2.AsyncClient, fields: Json, param: str
) -> None:
    assert (await refusal(http, **fields))["param"] == param


async def test_an_unknown_model_is_not_found(http: httpx2.AsyncClient) -> None:
    assert (await http.post(RESPONSES, json=body(model="gpt-5"))).status_code == 404


async def test_what_codex_sends_is_answered(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    says(engine, tokenizer, TURN)
    developer = [{"type": "input_text", "text": "Be brief."}]
    asked = {
        "model": MODEL,
        "input": [
            {"type": "message", "role": "developer", "content": developer},
            {"type": "message", "role": "developer", "content": developer},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ],
        "tools": [
            LOOK | {"strict": False},
            {"type": "namespace", "name": "n", "tools": []},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "temperature": 0,
        "prompt_cache_key": "0198",
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    response = await http.post(RESPONSES, json=asked)
    assert response.status_code == 200, response.text
    kinds = [item["type"] for item in events(response.text)[-1]["response"]["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
