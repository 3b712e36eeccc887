"""Which requests may be kept on disk: what they ask for, and whether they could be found again."""

from typing import Any

import pytest

from engine.types import Request
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, COMPLETIONS, Engine, chat, posted, prompt, serving

MESSAGES, RESPONSES, OLLAMA_CHAT = "/v1/messages", "/v1/responses", "/api/chat"
SECRET = bytes(32)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(max_tokens=1),
    COMPLETIONS: prompt(max_tokens=1),
    RESPONSES: {"input": "Hello", "max_output_tokens": 1},
    MESSAGES: chat(max_tokens=1),
    OLLAMA_CHAT: {"messages": chat()["messages"], "options": {"num_predict": 1}, "stream": False},
}
ASKED = (CHAT, COMPLETIONS, RESPONSES)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("retention", "written"), [("in-memory", False), ("in_memory", False), ("24h", True)]
)
async def test_a_request_is_kept_on_disk_unless_openais_field_says_in_memory(
    path: str,
    retention: str,
    written: bool,
    engine: Engine,
    submitted: list[Request],
    tokenizer: Tokenizer,
) -> None:
    async with serving(engine.client, tokenizer, secret=SECRET) as (_, http):
        for fields in ({}, {"prompt_cache_retention": None}, {"prompt_cache_retention": retention}):
            await posted(http, path, BODIES[path] | fields)
    silent, null, told = (request.salt for request in submitted)
    assert silent.may_be_written
    assert null.may_be_written
    assert told.may_be_written == (written or path not in ASKED), "others ignore the field"
    assert told == silent, "in memory they share"


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_is_kept_on_disk_under_a_secret_that_ends_with_the_process(
    path: str, engine: Engine, submitted: list[Request], tokenizer: Tokenizer
) -> None:
    async with serving(engine.client, tokenizer) as (_, http):
        await posted(http, path, BODIES[path])
    assert not submitted[0].salt.may_be_written
