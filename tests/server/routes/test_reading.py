"""Which requests may be kept on disk: what they ask for, and whether they could be found again."""

from typing import Any

import pytest

from engine.types import Request
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    Engine,
    chat,
    engine_fixture,
    posted,
    prompt,
    recorded,
    serving,
)

MESSAGES, RESPONSES, OLLAMA_CHAT = "/v1/messages", "/v1/responses", "/api/chat"
SECRET = bytes(32)
LENGTH = {"options": {"num_predict": 1}, "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(max_tokens=1),
    COMPLETIONS: prompt(max_tokens=1),
    RESPONSES: {"input": "Hello", "max_output_tokens": 1},
    MESSAGES: chat(max_tokens=1),
    OLLAMA_CHAT: {"messages": chat()["messages"]} | LENGTH,
    "/api/generate": {"prompt": "Hello"} | LENGTH,
    "/api/generate, raw": {"prompt": "Hello", "raw": True} | LENGTH,
}
VECTORS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hello"},
    "/api/embed": {"input": "Hello"},
    "/api/embeddings": {"prompt": "Hello"},
}
pools = engine_fixture(pools=True)


@pytest.mark.parametrize("path", [*BODIES, *VECTORS])
@pytest.mark.parametrize(
    ("retention", "written"), [("in-memory", False), ("in_memory", False), ("24h", True)]
)
async def test_a_request_is_kept_on_disk_unless_openais_field_says_in_memory(
    path: str,
    retention: str,
    written: bool,
    engine: Engine,
    pools: Engine,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = pools if path in VECTORS else engine
    submitted, noted = recorded(asked)
    monkeypatch.setattr(asked.client, "submit", noted)
    body = (BODIES | VECTORS)[path]
    async with serving(asked.client, tokenizer, secret=SECRET) as (_, http):
        for fields in ({}, {"prompt_cache_retention": None}, {"prompt_cache_retention": retention}):
            await posted(http, path.partition(",")[0], body | fields)
    silent, null, told = (request.salt for request in submitted)
    assert silent.may_be_written
    assert null.may_be_written
    assert told.may_be_written == written
    assert told == silent, "in memory they share"


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_is_kept_on_disk_under_a_secret_that_ends_with_the_process(
    path: str, engine: Engine, submitted: list[Request], tokenizer: Tokenizer
) -> None:
    async with serving(engine.client, tokenizer) as (_, http):
        await posted(http, path.partition(",")[0], BODIES[path])
    assert not submitted[0].salt.may_be_written


@pytest.mark.parametrize(
    "how", ["continued", "begun", "streamed", "twice", "by an item", "by an input", "deleted"]
)
@pytest.mark.parametrize("retention", ["in-memory", "in_memory", "24h"])
async def test_what_takes_up_a_response_stays_in_memory_where_that_does(
    how: str, retention: str, engine: Engine, submitted: list[Request], tokenizer: Tokenizer
) -> None:
    asked = BODIES[RESPONSES]
    wish = {"prompt_cache_retention": retention}
    async with serving(engine.client, tokenizer, secret=SECRET) as (_, http):
        first = await posted(http, RESPONSES, asked | wish)
        fields: dict[str, Any] = {"previous_response_id": first["id"]}
        if how == "begun":
            fields |= {"input": None, "continue_final_message": True}
        elif how == "by an item":
            fields = {"input": [{"id": first["output"][0]["id"]}, *chat()["messages"]]}
        elif how == "by an input":
            items = (await http.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
            fields = {"input": [{"type": "item_reference", "id": items[0]["id"]}]}
        elif how in ("twice", "deleted"):
            fields["previous_response_id"] = (await posted(http, RESPONSES, asked | fields))["id"]
        if how == "deleted":
            await http.delete(f"{RESPONSES}/{first['id']}")
        if how == "streamed":
            await http.post(RESPONSES, json=asked | fields | {"stream": True})
        else:
            last = await posted(http, RESPONSES, asked | fields)
            kept = "in_memory" if retention != "24h" else None
            assert last["prompt_cache_retention"] == kept
        await posted(http, RESPONSES, asked)
    *all_of_it, other = (request.salt.may_be_written for request in submitted)
    assert {*all_of_it} == {retention == "24h"}
    assert other
