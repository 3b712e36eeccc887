"""Images and files, at the door of every API that takes a conversation: no model here sees them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from engine.types import Request
from server.config import Config, ImagesSection, UnseenRule
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, Engine, Json, serving

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
COUNTS = {
    CHAT: ("/tokenize", "count"),
    MESSAGES: ("/v1/messages/count_tokens", "input_tokens"),
    RESPONSES: ("/v1/responses/input_tokens", "input_tokens"),
}
HEADER = "X-Images-Not-Shown"
IMAGE = "[image not shown: this server reads text only]"
FILE = "[file not shown: this server reads text only]"
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
LOOK_ANTHROPIC = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
LOOK_OPENAI = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
LOOK_ITEM = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"}


def result(*content: Json) -> Json:
    return {"type": "tool_result", "tool_use_id": "t1", "content": list(content)}


def messages(*turns: Json) -> Json:
    return {"messages": list(turns), "temperature": 0}


def user(*content: Json) -> Json:
    return {"role": "user", "content": list(content)}


# By API: a question with a picture, and a talk in which a tool has shown a picture and a file.
ASKED: dict[str, Json] = {
    CHAT: messages(
        user(
            {"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "data:,"}}
        )
    ),
    MESSAGES: messages(user({"type": "text", "text": "What?"}, {"type": "image", "source": PNG})),
    RESPONSES: {
        "input": [
            user(
                {"type": "input_text", "text": "What?"},
                {"type": "input_image", "detail": "auto", "image_url": "data:,"},
            )
        ],
        "temperature": 0,
    },
}
SHOWN: dict[str, Json] = {
    CHAT: messages(
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [LOOK_OPENAI]},
        {
            "role": "tool",
            "tool_call_id": "t1",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:,"}},
                {"type": "file", "file": {"file_data": "JVBERi0="}},
            ],
        },
    ),
    MESSAGES: messages(
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [LOOK_ANTHROPIC]},
        user(result({"type": "image", "source": PNG}, {"type": "document", "source": PDF})),
    ),
    RESPONSES: {
        "input": [
            {"role": "user", "content": "Look."},
            LOOK_ITEM,
            {
                "type": "function_call_output",
                "call_id": "t1",
                "output": [
                    {"type": "input_image", "image_url": "data:,"},
                    {"type": "input_file", "filename": "a.pdf", "file_data": "JVBERi0="},
                ],
            },
        ],
        "temperature": 0,
    },
}
PLACES = {
    CHAT: "messages[0].content[1]",
    MESSAGES: "messages[0].content[1]",
    RESPONSES: "input[0].content[1]",
}


def bounded(path: str, body: Json, **fields: Any) -> Json:
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return body | {length: 2} | fields


@asynccontextmanager
async def served(
    engine: Engine, tokenizer: Tokenizer, rule: UnseenRule
) -> AsyncIterator[httpx2.AsyncClient]:
    """With one rule for all APIs."""
    config = Config(images=ImagesSection(chat=rule, responses=rule, messages=rule))
    async with serving(engine.client, tokenizer, config) as (_, client):
        yield client


def prompt_of(tokenizer: Tokenizer, request: Request) -> str:
    return tokenizer.fast.decode(list(request.prompt_ids), skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", COUNTS)
async def test_a_model_is_told_of_an_image_that_it_is_not_shown(
    engine: Engine, tokenizer: Tokenizer, submitted: list[Request], path: str, stream: bool
) -> None:
    async with served(engine, tokenizer, "placeholder") as http:
        with capture_logs() as entries:
            response = await http.post(path, json=bounded(path, ASKED[path], stream=stream))
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "1"
    assert f"What?{IMAGE}<|im_end|>" in prompt_of(tokenizer, submitted[0])
    assert [entry["images_not_shown"] for entry in entries if entry["event"] == "request"] == [1]


@pytest.mark.parametrize("path", COUNTS)
async def test_what_a_tool_has_shown_does_not_end_the_session(
    engine: Engine, tokenizer: Tokenizer, submitted: list[Request], path: str
) -> None:
    async with served(engine, tokenizer, "placeholder") as http:
        response = await http.post(path, json=bounded(path, SHOWN[path]))
        assert response.status_code == 200, response.text
        assert response.headers[HEADER] == "2"
        assert f"tool\n{IMAGE}{FILE}<|im_end|>" in prompt_of(tokenizer, submitted[0])
        count, name = COUNTS[path]
        counted = await http.post(count, json=SHOWN[path])
    assert counted.json()[name] == len(submitted[0].prompt_ids)
    assert counted.headers[HEADER] == "2"


@pytest.mark.parametrize("path", COUNTS)
async def test_an_image_may_be_refused_by_its_place_with_the_setting_that_does_it(
    engine: Engine, tokenizer: Tokenizer, path: str
) -> None:
    async with served(engine, tokenizer, "refuse") as http:
        for where in (path, COUNTS[path][0]):
            with capture_logs() as entries:
                response = await http.post(where, json=bounded(path, ASKED[path]))
            error = response.json()["error"]
            assert response.status_code == 400
            assert PLACES[path] in (error.get("param"), error["message"].partition(":")[0])
            api = {CHAT: "chat", MESSAGES: "messages", RESPONSES: "responses"}[path]
            assert f'images.{api} = "placeholder"' in error["message"]
            assert HEADER not in response.headers
            assert not any("images_not_shown" in entry for entry in entries)


async def test_agents_apis_go_on_and_a_chat_is_refused_where_nothing_is_set(
    http: httpx2.AsyncClient,
) -> None:
    found = {path: (await http.post(path, json=bounded(path, ASKED[path]))) for path in COUNTS}
    assert {path: response.status_code for path, response in found.items()} == {
        CHAT: 400,
        MESSAGES: 200,
        RESPONSES: 200,
    }


async def test_a_talk_without_images_says_nothing_of_them(http: httpx2.AsyncClient) -> None:
    with capture_logs() as entries:
        body = messages({"role": "user", "content": "Hello"})
        response = await http.post(MESSAGES, json=body | {"max_tokens": 2})
    assert response.status_code == 200
    assert HEADER not in response.headers
    assert not any("images_not_shown" in entry for entry in entries)


async def test_a_stored_response_remembers_that_there_was_an_image(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, submitted: list[Request]
) -> None:
    first = await http.post(RESPONSES, json=bounded(RESPONSES, ASKED[RESPONSES]))
    given = bounded(RESPONSES, {"input": "And?", "previous_response_id": first.json()["id"]})
    second = await http.post(RESPONSES, json=given)
    assert second.headers[HEADER] == "1"
    assert f"What?{IMAGE}<|im_end|>" in prompt_of(tokenizer, submitted[-1])
    listed = (await http.get(f"{RESPONSES}/{first.json()['id']}/input_items")).json()["data"]
    assert [part["type"] for part in listed[0]["content"]] == ["input_text", "input_image"]
