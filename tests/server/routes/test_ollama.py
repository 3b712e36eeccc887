"""Ollama's API over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import httpx2
import pytest

from engine.types import Request
from server.config import Config, ImagesSection, ServerSection
from server.protocol.ollama.answer import API_VERSION
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
    serving,
    token_id,
    told,
)

OLLAMA_CHAT, GENERATE = "/api/chat", "/api/generate"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Grüße", "n": 1.5}}\n</tool_call>'
MAX_LEN = 1000
MAX_MESSAGES = 20
COUNTS = ("prompt_eval_count", "eval_count")
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def chat(content: str = "Hello", **fields: Any) -> Json:
    """A greedy request of one message."""
    asked = {"messages": [{"role": "user", "content": content}]}
    options = {"temperature": 0, "num_predict": 300} | fields.pop("options", {})
    return asked | fields | {"options": options}


def text(prompt: str = "Hello", **fields: Any) -> Json:
    """A greedy request for a text."""
    return {"prompt": prompt, **chat(**fields), "messages": None}


# With room for tools in its prompts.
engine = engine_fixture(max_model_len=MAX_LEN)


@pytest.fixture
async def http(engine: Engine, tokenizer: Tokenizer) -> AsyncIterator[httpx2.AsyncClient]:
    async with told(engine, tokenizer, max_messages=MAX_MESSAGES) as client:
        yield client


def lines_of(response: httpx2.Response) -> list[Json]:
    """The objects of a stream, of which the last one is the end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    assert all(one["model"] == MODEL for one in found)
    return found


def added_up(lines: list[Json]) -> Json:
    """What a client makes of a stream: the end, with all that was said before it."""
    found = dict(lines[-1])
    said: Json = dict(found["message"]) if "message" in found else {"response": found["response"]}
    for line in lines[:-1]:
        for name, value in line.get("message", line).items():
            if name in ("content", "thinking", "response"):
                said[name] = said.get(name, "") + value
            elif name == "tool_calls":
                said[name] = said.get(name, []) + value
    return found | ({"message": said} if "message" in found else said)


def lasting(found: Json) -> Json:
    """What two answers to one request have in common."""
    calls = found.get("message", {}).get("tool_calls", [])
    assert all(call.pop("id").startswith("call_") for call in calls)
    assert datetime.fromisoformat(found["created_at"]).tzinfo is not None
    return {key: found[key] for key in found if key not in ("created_at", *DURATIONS)}


async def answer(http: httpx2.AsyncClient, body: Json, path: str = OLLAMA_CHAT) -> Json:
    """A whole answer, which is the same when it is streamed."""
    response = await http.post(path, json=body | {"stream": False})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    found: Json = response.json()
    streamed = added_up(lines_of(await http.post(path, json=body)))
    assert lasting(streamed) == lasting(json.loads(response.text))
    return found


async def refused(http: httpx2.AsyncClient, path: str, body: Any) -> str:
    """What a 400 says."""
    error = await posted(http, path, body, status=400)
    assert error.keys() == {"error"}
    said: str = error["error"]
    return said


# --- what there is ---------------------------------------------------------------------------


async def test_who_looks_for_a_model_finds_what_it_can_do(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/api/version")).json() == {"version": API_VERSION}
    (listed,) = (await http.get("/api/tags")).json()["models"]
    assert (listed["name"], listed["model"]) == (MODEL, MODEL)
    assert len(listed["digest"]) == 64
    shown = (await http.post("/api/show", json={"model": MODEL})).json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == MAX_LEN
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert "im_start" in shown["template"]
    (there,) = (await http.get("/api/ps")).json()["models"]
    assert there["context_length"] == MAX_LEN
    assert 0 < there["size"] < there["size_max"]
    assert datetime.fromisoformat(there["expires_at"]).year == 2300
    for path in ("/api/version", "/api/tags", "/api/ps"):
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("body", [{}, {"name": MODEL}, {"model": f"{MODEL}:latest"}])
async def test_a_model_is_shown_by_all_of_its_names(http: httpx2.AsyncClient, body: Json) -> None:
    response = await http.post("/api/show", json=body)
    assert (response.status_code, response.json()["details"]["format"]) == (200, "safetensors")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/show", {"model": "gpt"}),
        ("/api/show", {"name": "gpt"}),
        (OLLAMA_CHAT, {"model": "gpt"}),
        (GENERATE, {"model": "gpt", "prompt": "x"}),
        ("/api/embed", {"model": "gpt", "input": "x"}),
    ],
)
async def test_another_model_is_not_found_in_ollamas_words(
    http: httpx2.AsyncClient, path: str, body: Json
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 404
    assert response.json() == {"error": "model 'gpt' not found"}


async def test_what_ollama_has_beside_answers_is_not_there(http: httpx2.AsyncClient) -> None:
    for method, path, text in (
        ("POST", "pull", "quire downloads no model on request: run `quire pull NAME` on"),
        ("DELETE", "delete", "quire removes no model on request: run `quire rm NAME` on"),
        ("POST", "copy", "quire copies no models: its setting models.aliases gives them more"),
        *(
            ("POST", path, "There is nothing")
            for path in ("push", "create", "blobs/sha256:0", "no")
        ),
    ):
        response = await http.request(method, f"/api/{path}", json={})
        assert response.status_code == 404
        assert response.json()["error"].startswith(text)
    for path in ("speech", "transcriptions", "translations"):
        error = (await http.post(f"/v1/audio/{path}", json={})).json()["error"]
        assert error["message"].startswith(
            "quire reads and writes text: have your client use anoth"
        )
    response = await http.get(OLLAMA_CHAT)
    assert (response.status_code, list(response.json())) == (405, ["error"])


# --- answers ---------------------------------------------------------------------------------


async def test_an_answer_is_lines_unless_it_is_wanted_whole(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    said = ids_of(tokenizer, f"<think>\nHm.\n</think>\n\nGrüße!{END}")
    engine.script[:] = said
    found = await answer(http, chat())
    assert found["message"] == {"role": "assistant", "content": "Grüße!", "thinking": "Hm."}
    assert (found["done"], found["done_reason"]) == (True, "stop")
    assert found["eval_count"] == len(said)
    assert found["prompt_eval_count"] > 10
    assert found["load_duration"] == 0
    spent = found["prompt_eval_duration"] + found["eval_duration"]
    assert 0 < spent <= found["total_duration"] < 60 * 10**9
    assert found["created_at"].endswith("Z")
    assert len(found["created_at"]) == len("2026-11-23T14:41:23.123456789Z")


async def test_a_text_is_generated_as_a_message_is(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    engine.script[:] = ids_of(tokenizer, f"<think>\nHm.\n</think>\n\nYes.{END}")
    system = {"role": "system", "content": "Be brief."}
    messages = [system, *chat("Really?")["messages"]]
    await http.post(OLLAMA_CHAT, json={"messages": messages, "options": {"num_predict": 1}})
    await http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    found = await answer(http, text("Really?", system="Be brief."), GENERATE)
    assert (found["response"], found["thinking"]) == ("Yes.", "Hm.")
    assert "message" not in found
    assert len({request.prompt_ids for request in submitted}) == 1
    assert len(submitted) == 4


async def test_a_raw_prompt_is_gone_on_with(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    engine.script[:] = ids_of(tokenizer, f"<think>in a time.{END}")
    body = text(f"Once{END}", raw=True, options={"stop": "time"})
    found = await answer(http, body, GENERATE)
    assert (found["response"], found["done_reason"]) == ("<think>in a ", "stop")
    assert submitted[0].prompt_ids == tuple(ids_of(tokenizer, f"Once{END}"))
    for name, value in (("system", "x"), ("format", "json"), ("think", True), ("images", ["x"])):
        said = await refused(http, GENERATE, body | {name: value})
        assert said.startswith(f"{name} is not supported with raw")
    assert f"about {15 * MAX_LEN} tokens" in await refused(
        http, GENERATE, body | {"prompt": "x" * 15 * MAX_LEN}
    )
    assert f"{MAX_LEN} tokens" in await refused(http, GENERATE, body | {"prompt": "x" * MAX_LEN})


async def test_tools_are_called(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"Let me look.\n{CALL}\n{CALL}{END}")
    found = await answer(http, chat(tools=[LOOK]))
    first, second = found["message"]["tool_calls"]
    assert first["function"] == {
        "index": 0,
        "name": "look",
        "arguments": {"at": "Grüße", "n": 1.5},
    }
    assert (second["function"]["index"], first["id"] != second["id"]) == (1, True)
    assert found["message"]["content"] == "Let me look."
    assert found["done_reason"] == "stop"


async def test_a_call_that_is_cut_off_is_text(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    broken = '<tool_call>\n{"name": "look", "arguments": {"at": "a'
    for before in ("", "Well.\n"):
        engine.script[:] = ids_of(tokenizer, before + broken)
        cut = {"num_predict": len(engine.script)}
        found = await answer(http, chat(tools=[LOOK], options=cut))
        message = found["message"]
        assert message == {"role": "assistant", "content": before + broken}


async def test_a_resent_conversation_is_the_one_that_a_chat_resends(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    engine.script[:] = ids_of(tokenizer, f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}{END}")
    asked = chat(tools=[LOOK], stream=False)
    turn = (await http.post(OLLAMA_CHAT, json=asked)).json()["message"]
    asked["messages"] += [turn, {"role": "tool", "tool_name": "look", "content": "sunny"}]
    await http.post(OLLAMA_CHAT, json=asked)
    first, resent = [request.prompt_ids for request in submitted]
    generated = tuple(engine.script)
    assert resent[: len(first) + len(generated)] == first + generated
    same = {"messages": chat()["messages"], "tools": [LOOK], "temperature": 0}
    turn = (await http.post(CHAT, json=same)).json()["choices"][0]["message"]
    answered = {
        "role": "tool",
        "content": "sunny",
        "tool_call_id": turn["tool_calls"][0]["id"],
    }
    same["messages"] = [*chat()["messages"], turn, answered]
    await http.post(CHAT, json=same)
    assert submitted[3].prompt_ids == resent


async def test_an_answer_that_is_begun_is_gone_on_with(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    begun = [{"role": "assistant", "content": "Once upon"}]
    body = {"messages": chat()["messages"] + begun}
    await http.post(OLLAMA_CHAT, json=body | {"options": {"num_predict": 1}})
    await http.post(CHAT, json=body | {"continue_final_message": True, "max_tokens": 1})
    assert submitted[0].prompt_ids == submitted[1].prompt_ids
    assert "nothing before" in await refused(http, OLLAMA_CHAT, {"messages": begun})


@pytest.mark.parametrize("think", [False, True, "low", "high", None])
async def test_thoughts_are_as_many_as_are_wanted(
    http: httpx2.AsyncClient, submitted: list[Request], think: Any
) -> None:
    options: Json = {"think": think, "options": {"num_predict": 1}}
    plain: dict[Any, Json] = {
        False: {"reasoning_effort": "none"},
        True: {"enable_thinking": True},
        None: {},
    }
    same = plain.get(think, {"reasoning_effort": think})
    await http.post(OLLAMA_CHAT, json=chat(**options))
    await http.post(CHAT, json={"messages": chat()["messages"], "max_tokens": 1} | same)
    ours, theirs = submitted
    assert ours.prompt_ids == theirs.prompt_ids
    assert (ours.constraint is None) == (theirs.constraint is None) == (think != "low")


@pytest.mark.parametrize(
    ("format", "fits"),
    [
        ({"enum": ["yes", "no"]}, ("yes", "no")),
        ({"type": "object", "properties": {}, "additionalProperties": False}, ({},)),
    ],
)
async def test_an_answer_has_the_form_that_was_asked_for(
    http: httpx2.AsyncClient, format: Json, fits: tuple[Any, ...]
) -> None:
    body = chat(format=format, think=False)
    assert json.loads((await answer(http, body))["message"]["content"]) in fits
    body = text(format=format, think=False)
    assert json.loads((await answer(http, body, GENERATE))["response"]) in fits


async def test_a_form_is_json_or_a_schema(
    http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    for format, is_held in (("json", True), ({}, True), ("", False), (None, False)):
        body = chat(format=format, think=False, options={"num_predict": 2})
        assert (await http.post(OLLAMA_CHAT, json=body)).status_code == 200
        assert (submitted[-1].constraint is not None) == is_held
    assert (await refused(http, OLLAMA_CHAT, chat(format="yaml"))).startswith("format must be")


async def test_options_are_the_parameters_of_the_engine(
    http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
        "seed": 42,
        "num_predict": 3,
        "stop": ["x", "y"],
        "num_ctx": 17,
        "num_gpu": 99,
        "heard_of": "nothing",
    }
    found = await answer(http, chat(options=options))
    assert (found["done_reason"], found["eval_count"]) == ("length", 3)
    params = submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 7, 0.125)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, 0.75)
    assert (params.frequency_penalty, params.seed, params.max_tokens) == (-0.5, 42, 3)


async def test_no_length_and_no_seed_are_what_ollama_means_by_them(
    http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    for length in (0, -1, -2, None):
        body = chat(think=False, options={"num_predict": length, "seed": -1, "stop": "e"})
        await http.post(OLLAMA_CHAT, json=body)
    (room,) = {len(one.prompt_ids) + one.params.max_tokens for one in submitted}
    assert room == MAX_LEN
    assert len({one.params.seed for one in submitted}) == 4


# As in Ollama's API page, and what completion plugins send.
COPIED: dict[str, Any] = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 3,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 0.7,
    "repeat_last_n": 33,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "penalize_newline": True,
    "mirostat": 1,
    "mirostat_tau": 0.8,
    "mirostat_eta": 0.6,
    "tfs_z": 0.5,
    "numa": False,
    "num_ctx": 1024,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "low_vram": False,
    "use_mmap": True,
    "num_thread": 8,
    "stop": ["w1", *(f"<|{n}|>" for n in range(20))],
}


@pytest.mark.parametrize("path", [OLLAMA_CHAT, GENERATE])
@pytest.mark.parametrize(
    "options",
    [
        COPIED,
        {name: float(value) for name, value in COPIED.items() if type(value) is int},
        {"repeat_last_n": 64, "repeat_penalty": 1.1},
        {"repeat_last_n": -1.0, "frequency_penalty": 1},
        {"top_p": 0},
        {"stop": [f"<{n}>" for n in range(500)]},
    ],
)
async def test_options_are_taken_as_ollama_takes_them(
    http: httpx2.AsyncClient, submitted: list[Request], path: str, options: dict[str, Any]
) -> None:
    asked = chat() if path == OLLAMA_CHAT else {"prompt": "Hello"}
    response = await http.post(path, json=asked | {"stream": False, "options": options})
    assert response.status_code == 200, response.text
    params = submitted[0].params
    assert params.repetition_penalty == options.get("repeat_penalty", 1)
    assert params.seed == options.get("seed", params.seed)


async def test_penalties_that_look_at_no_token_are_none(
    http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1}
    await http.post(OLLAMA_CHAT, json=chat(options=penalties | {"repeat_last_n": 0}))
    params = submitted[0].params
    assert params.repetition_penalty == 1
    assert (params.presence_penalty, params.frequency_penalty) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"temperature": 3}}, "options.temperature: "),
        ({"options": {"num_predict": -3}}, "options.num_predict: "),
        ({"options": {"stop": ""}}, "options.stop: A stop string"),
        ({"options": {"stop": ["a"] * 513}}, "options.stop: There may be at most 512 stop strings"),
        ({"options": {"max_tokens": 5}}, "max_tokens is not supported: use num_predict"),
        ({"options": {"top_k": 20.5}}, "options.top_k: "),
        ({"options": {"repeat_last_n": "64"}}, "options.repeat_last_n: "),
        ({"options": []}, "options: "),
        ({"keep_alive": "soon"}, "keep_alive is no duration"),
        ({"think": "deeply"}, "think: "),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs may be at most 20."),
        ({"template": "{{ .Prompt }}"}, "template is not supported: the template is the model's"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role: "),
        ({"messages": chat()["messages"] * (MAX_MESSAGES + 1)}, "There are 21 messages"),
        (
            {"messages": [{"role": "user", "content": "x" * MAX_LEN}]},
            "This model's maximum context",
        ),
        ({"messages": [{"role": "user", "images": ["x"]}]}, "messages[0].images[0]: "),
        ({"tools": [{"type": "function"}]}, "tools[0].function: "),
    ],
)
@pytest.mark.parametrize("stream", [False, None])
async def test_what_cannot_be_done_is_named(
    http: httpx2.AsyncClient, fields: Json, named: str, stream: bool | None
) -> None:
    said = await refused(http, OLLAMA_CHAT, chat() | fields | {"stream": stream})
    assert said.startswith(named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"suffix": "x"}, "suffix is not supported"),
        ({"context": [1, 2]}, "context is not supported: send the conversation to /api/chat"),
        ({"template": "x"}, "template is not supported"),
        ({"images": ["x"]}, "images[0]: "),
    ],
)
async def test_what_a_text_cannot_be_made_of_is_named(
    http: httpx2.AsyncClient, fields: Json, named: str
) -> None:
    assert (await refused(http, GENERATE, {"prompt": "x"} | fields)).startswith(named)


async def test_an_overflow_has_both_figures_whatever_num_ctx_says(http: httpx2.AsyncClient) -> None:
    body = chat("x" * MAX_LEN, options={"num_ctx": 2 * MAX_LEN})
    said = await refused(http, OLLAMA_CHAT, body)
    assert f"maximum context length is {MAX_LEN} tokens" in said
    assert "resulted in 1019 tokens" in said


@pytest.mark.parametrize("path", [OLLAMA_CHAT, GENERATE])
@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), (0, "unload"), ("0s", "unload"), ("10m", "load"), (-1, "load")],
)
async def test_who_asks_nothing_is_told_at_once_that_the_model_is_there(
    http: httpx2.AsyncClient, submitted: list[Request], path: str, keep_alive: Any, reason: str
) -> None:
    body = {"model": MODEL, "keep_alive": keep_alive, "messages": [], "prompt": ""}
    response = await http.post(path, json=body)
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert (found["done"], found["done_reason"]) == (True, reason)
    assert found.get("response", found.get("message", {}).get("content")) == ""
    assert not submitted


async def test_probabilities_are_those_of_a_chat(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"<think>\nHm.\n</think>\n\nGrüße{END}")
    wanted: Json = {"logprobs": True, "top_logprobs": 2}
    same = {"messages": chat()["messages"], "temperature": 0} | wanted
    theirs = (await http.post(CHAT, json=same)).json()["choices"][0]["logprobs"]["content"]
    found = await answer_with_probabilities(http, chat(**wanted))
    assert found == theirs
    assert await answer_with_probabilities(http, text(**wanted), GENERATE) == theirs


async def answer_with_probabilities(
    http: httpx2.AsyncClient, body: Json, path: str = OLLAMA_CHAT
) -> list[Json]:
    whole = (await http.post(path, json=body | {"stream": False})).json()["logprobs"]
    lines = lines_of(await http.post(path, json=body))
    assert [one for line in lines for one in line.get("logprobs", [])] == whole
    found: list[Json] = whole
    return found


async def test_images_are_what_the_setting_says(engine: Engine, tokenizer: Tokenizer) -> None:
    config = Config(images=ImagesSection(ollama="placeholder"))
    message = {"role": "user", "content": "What?", "images": ["aGk=", "aGk="]}
    async with serving(engine.client, tokenizer, config) as (_, http):
        short = {"options": {"num_predict": 1}}
        response = await http.post(OLLAMA_CHAT, json={"messages": [message]} | short)
        assert response.headers["x-images-not-shown"] == "2"
        response = await http.post(GENERATE, json={"prompt": "What?", "images": ["aGk="]} | short)
        assert response.headers["x-images-not-shown"] == "1"


async def test_requests_with_another_salt_share_nothing(
    http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    for salt in ("a", "b", "a"):
        await http.post(OLLAMA_CHAT, json=chat(cache_salt=salt, options={"num_predict": 1}))
    one, two, again = [request.salt for request in submitted]
    assert (one == again, one == two) == (True, False)


# --- streams and faults ----------------------------------------------------------------------


async def test_silence_is_filled_with_lines_that_say_nothing(tokenizer: Tokenizer) -> None:
    config = Config(server=ServerSection(sse_ping_s=0.01))
    async with own_engine(tokenizer, config, closed=True) as (engine, app, _):
        connection = Connection(app, OLLAMA_CHAT, chat(options={"num_predict": 2}))
        await connection.begins()
        await eventually(lambda: connection.body.count(b"\n") > 3)
        engine.gate.open()
        await connection.end()
    lines = [json.loads(line) for line in bytes(connection.body).splitlines()]
    assert lines[0]["message"] == lines[2]["message"] == {"role": "assistant", "content": ""}
    assert lines[-1]["done"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_the_engine_is_an_error(tokenizer: Tokenizer, stream: bool) -> None:
    async with own_engine(tokenizer, failing=token_id(tokenizer, "#")) as (engine, _, http):
        engine.script[:] = ids_of(tokenizer, "abc#d")
        response = await http.post(OLLAMA_CHAT, json=chat(stream=stream))
        assert response.status_code == (200 if stream else 500)
        last = json.loads(response.text.splitlines()[-1])
        assert last.keys() == {"error"}
        assert last["error"].startswith("Generation failed")


async def test_an_engine_that_has_ended_loads_nothing(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer) as (engine, _, http):
        engine.stop()
        for body in ({}, chat()):
            response = await http.post(OLLAMA_CHAT, json=body)
            assert (response.status_code, list(response.json())) == (503, ["error"])


async def test_a_full_queue_says_when_to_come_again(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer, closed=True, max_num_seqs=1, max_queue=0) as served:
        engine, app, http = served
        first = Connection(app, OLLAMA_CHAT, chat(options={"num_predict": 2}))
        await eventually(lambda: engine.client.in_flight == 1)
        response = await http.post(GENERATE, json={"prompt": "x"})
        assert (response.status_code, list(response.json())) == (429, ["error"])
        assert "retry-after" in response.headers
        engine.gate.open()
        await first.end()


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_is_not_answered_any_more(tokenizer: Tokenizer, stream: bool) -> None:
    async with own_engine(tokenizer, closed=True) as (engine, app, _):
        connection = Connection(app, OLLAMA_CHAT, chat(stream=stream))
        await eventually(lambda: engine.client.in_flight == 1)
        connection.leave()
        async with asyncio.timeout(60):
            await connection.end()
        engine.gate.open()
        await eventually(lambda: engine.client.in_flight == 0)
