"""Responses over HTTP: what is answered, streamed, stored and continued."""

import json
from typing import Any

import httpx2
import pytest

from engine.types import Request
from server.text.tokenizer import Tokenizer
from tests.api.wire import read_named_events
from tests.server.harness import (
    END,
    Connection,
    Engine,
    Json,
    engine_fixture,
    eventually,
    ids_of,
    posted,
    serving,
    token_id,
    told,
)

RESPONSES = "/v1/responses"
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"enum": ["a", "b"]}},
    "required": ["at"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "name": "look", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
TURN = f"<think>\nHm.\n</think>\n\nSure.\n{CALL}"


# With room for tools in its prompts.
engine = engine_fixture(max_model_len=900, prefix_keep_s=1000.0)


@pytest.fixture
def prompts(engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine is asked, from now on."""
    asked: list[str] = []
    submit = engine.client.submit

    def spy(submission: Request, *args: Any) -> Any:
        ids = list(submission.prompt_ids)
        asked.append(tokenizer.fast.decode(ids, skip_special_tokens=False))
        return submit(submission, *args)

    monkeypatch.setattr(engine.client, "submit", spy)
    return asked


def body(given: Any = "Hello", **fields: Any) -> Json:
    return {"input": given, "temperature": 0} | fields


async def stream(http: httpx2.AsyncClient, given: Any = "Hello", **fields: Any) -> list[Json]:
    response = await http.post(RESPONSES, json=body(given, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_named_events(response.text)


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


async def test_a_response_has_all_fields_that_open_responses_asks_for(
    http: httpx2.AsyncClient,
) -> None:
    asked = body(max_output_tokens=1, prompt_cache_key="k", presence_penalty=0.5)
    found = await posted(http, RESPONSES, asked)
    assert {name: found[name] for name in OPEN_RESPONSES} == {
        "completed_at": None,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.0,
        "max_tool_calls": None,
        "service_tier": "default",
        "safety_identifier": None,
        "prompt_cache_key": "k",
    }


async def test_a_response_repeats_what_is_in_force(http: httpx2.AsyncClient) -> None:
    found = await posted(http, RESPONSES, body(top_p=0.25, max_output_tokens=1))
    assert (found["temperature"], found["top_p"], found["max_output_tokens"]) == (0, 0.25, 1)
    assert (found["tool_choice"], found["tools"], found["store"]) == ("auto", [], True)
    assert found["text"] == {"format": {"type": "text"}}
    assert found["reasoning"] == {"effort": None, "summary": None}
    assert (found["instructions"], found["metadata"]) == (None, {})
    assert found["truncation"] == "disabled"


async def test_a_response_repeats_what_was_asked(http: httpx2.AsyncClient) -> None:
    form = {"type": "json_schema", "schema": PARAMETERS}
    same: Json = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "tool_choice": {"type": "function", "name": "look"},
        "store": False,
        "top_logprobs": 1,
    }
    asked = body(
        **same,
        tools=[LOOK, {"type": "web_search"}],
        text={"format": form, "verbosity": "low"},
        reasoning={"effort": "low"},
        max_tokens=7,
    )
    found = await posted(http, RESPONSES, asked)
    assert found == found | same
    assert [tool["name"] for tool in found["tools"]] == ["look"]
    named = form | {"name": "answer", "strict": False}
    assert found["text"] == {"format": named, "verbosity": "low"}
    assert (found["reasoning"]["effort"], found["max_output_tokens"]) == ("low", 7)
    asked = body(tools=[LOOK], tool_choice="required", max_output_tokens=1)
    assert (await posted(http, RESPONSES, asked))["tool_choice"] == "required"


# --- the same prompt -------------------------------------------------------------------------


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
    second = body(max_output_tokens=2, previous_response_id=first["id"])
    link = {"previous_response_id": (await posted(http, RESPONSES, second))["id"]}
    assert (await http.delete(path)).json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    for method, at in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
        gone = await http.request(method, at)
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "response_not_found"
    # What a response was made of stays with it.
    await posted(http, RESPONSES, body(max_output_tokens=2) | link)


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
