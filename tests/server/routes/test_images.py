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
DATA = {"url": "data:,"}
LOOK = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def ask(*parts: Json) -> list[Json]:
    return [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]


# By API: a question with a picture.
ASKED: dict[str, Json] = {
    CHAT: {"messages": ask({"type": "image_url", "image_url": DATA})},
    MESSAGES: {"messages": ask({"type": "image", "source": {"type": "url", "url": "x"}})},
    RESPONSES: {"input": ask({"type": "input_image", "image_url": "data:,"})},
}
# A talk in which a tool has shown a picture and a file.
SHOWN: Json = {
    "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [LOOK]},
        {
            "role": "tool",
            "tool_call_id": "t1",
            "content": [
                {"type": "image_url", "image_url": DATA},
                {"type": "file", "file": {"file_data": "JVBERi0="}},
            ],
        },
    ]
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
async def test_a_model_is_told_of_images_that_it_is_not_shown_also_by_tools(
    engine: Engine, tokenizer: Tokenizer, submitted: list[Request], stream: bool
) -> None:
    """tests/api has what other APIs' clients may send."""
    async with served(engine, tokenizer, "placeholder") as http:
        with capture_logs() as entries:
            for body, heard, count in (
                (ASKED[CHAT], f"What?{IMAGE}", "1"),
                (SHOWN, f"tool\n{IMAGE}{FILE}", "2"),
            ):
                response = await http.post(CHAT, json=bounded(CHAT, body, stream=stream))
                assert (response.status_code, response.headers[HEADER]) == (200, count)
                assert f"{heard}<|im_end|>" in prompt_of(tokenizer, submitted[-1])
    told = [entry["images_not_shown"] for entry in entries if entry["event"] == "request"]
    assert told == [1, 2]


@pytest.mark.parametrize("path", COUNTS)
async def test_what_stands_for_an_image_is_counted(
    engine: Engine, tokenizer: Tokenizer, submitted: list[Request], path: str
) -> None:
    count, name = COUNTS[path]
    async with served(engine, tokenizer, "placeholder") as http:
        await http.post(path, json=bounded(path, ASKED[path]))
        counted = await http.post(count, json=ASKED[path])
    assert counted.json()[name] == len(submitted[0].prompt_ids)
    assert counted.headers[HEADER] == "1"


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
