import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from server.config import Config, LimitsSection
from server.routes.service import ENCODED_AT_ONCE
from server.text.conversation import Turn
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    Engine,
    chat,
    posted,
    prompt,
    serving,
    talk,
)

CONTEXT = 400  # tokens; see tests.engines


async def answer(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    return await posted(http, CHAT, chat(**fields))


async def refusal(http: httpx2.AsyncClient, body: Any) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    response = await http.post(CHAT, content=content)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error


# --- what is answered ------------------------------------------------------------------------


async def test_what_the_request_leaves_out_is_as_the_model_recommends(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    async with serving(engine.client, tokenizer, defaults={"temperature": 0.0}) as (_, http):
        greedy = await answer(http, max_tokens=20)
        silent = await answer(http, max_tokens=20, temperature=None)
        warm = await answer(http, max_tokens=20, temperature=2, seed=5)
    assert silent["choices"] == greedy["choices"]
    assert warm["choices"] != greedy["choices"]


# --- what is refused -------------------------------------------------------------------------


async def test_a_prompt_over_the_context_is_refused_in_the_words_that_agents_look_for(
    engine: Engine, http: httpx2.AsyncClient
) -> None:
    computed = engine.client.stats.prompt_tokens
    for chars in (CONTEXT, 2 * CONTEXT, 5 * CONTEXT, 20_000, 1_000_000):
        status, error = await refusal(http, chat("x" * chars))
        tokens = re.search(r"resulted in (?:about )?(\d+) tokens\.", error["message"])
        assert tokens is not None
        assert chars <= int(tokens[1]) <= 1.1 * chars
        assert ("about" in error["message"]) == (chars >= 2 * CONTEXT)
        assert (status, error["param"]) == (400, "messages")
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert engine.client.stats.prompt_tokens == computed


async def test_a_prompt_that_is_too_long_for_its_tools_says_so(http: httpx2.AsyncClient) -> None:
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "x" * 50}}
        for n in range(4)
    ]
    _, error = await refusal(http, chat("x" * 50, tools=tools))
    bare = (await answer(http, text="x" * 50, max_tokens=1))["usage"]["prompt_tokens"]
    tokens = int(re.search(r"resulted in (\d+) tokens", error["message"])[1])  # type: ignore[index]
    share = f"Of these the definitions of its 4 tools are {tokens - bare}: offer fewer."
    assert error["message"].endswith(share)
    huge = [{"type": "function", "function": {"name": "a", "description": "x" * 90_000}}]
    _, error = await refusal(http, chat("x" * 50, tools=huge))
    about = re.search(r"the definitions of its 1 tools are about (\d+): offer", error["message"])
    assert about is not None
    assert 90_000 < int(about[1]) < 95_000
    _, error = await refusal(http, chat("x" * CONTEXT, tools=tools))
    assert error["message"].endswith("Please shorten it.")


async def test_the_longest_prompt_that_fits_gets_one_token(
    http: httpx2.AsyncClient, tokenizer: Tokenizer
) -> None:
    empty = (await tokenizer.encode_chat(talk(Turn("user", "")))).ids
    longest = "x" * (CONTEXT - 1 - len(empty))
    assert (await answer(http, text=longest))["usage"]["completion_tokens"] == 1
    status, error = await refusal(http, chat(longest + "x"))
    assert (status, error["code"]) == (400, "context_length_exceeded")


@asynccontextmanager
async def with_template(
    engine: Engine, folder: Path, text: str, config: Config | None = None
) -> AsyncIterator[httpx2.AsyncClient]:
    write_tokenizer(folder, VOCAB, template=text)
    async with serving(engine.client, Tokenizer(folder), config) as (_, http):
        yield http


@pytest.mark.parametrize(
    "path",
    [CHAT, "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/api/chat", "/tokenize"],
)
async def test_a_model_without_a_template_refuses_chats(
    tokenizer: Tokenizer, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(tokenizer.template, "exists", False)
    body = {"input": "Hello"} if path.endswith("responses") else chat(max_tokens=1)
    refused = await http.post(path, json=body)
    assert refused.status_code == 400
    assert "no chat template" in refused.text
    assert "/v1/completions" in refused.text


async def test_messages_that_the_template_cannot_render_are_refused(
    engine: Engine, tmp_path: Path
) -> None:
    async with with_template(engine, tmp_path, "{{ raise_exception('no') }}") as http:
        status, error = await refusal(http, chat())
        counted = await http.post("/v1/messages/count_tokens", json=chat())
    assert (status, error["param"], counted.status_code) == (400, "messages", 400)
    assert error["message"].endswith("cannot render these messages: no.")


async def test_the_reason_of_a_template_that_fails_is_in_the_log_and_nothing_of_the_messages(
    engine: Engine, tmp_path: Path
) -> None:
    failing = "{{ '' }}\n{{ raise_exception('no ' ~ messages[0].content) }}"
    async with with_template(engine, tmp_path, failing) as http:
        with capture_logs() as entries:
            await refusal(http, chat("zebra"))
    (said,) = [entry for entry in entries if entry["log_level"] == "warning"]
    assert (said["event"], said["reason"]) == (
        "the chat template failed",
        "TemplateError in line 2",
    )
    assert "zebra" not in str(entries)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_threat_19_an_endless_template_is_ended_and_others_are_answered(
    path: str, engine: Engine, tmp_path: Path
) -> None:
    """More of them than are encoded at once."""
    config = Config(limits=LimitsSection(max_template_s=0.2))
    async with with_template(engine, tmp_path, ENDLESS, config) as http:
        asking = [http.post(path, json=chat(), timeout=60) for _ in range(ENCODED_AT_ONCE + 4)]
        waiting = asyncio.gather(*asking)
        assert (await http.get("/health")).status_code == 200
        answers = await waiting
        assert {answer.status_code for answer in answers} == {400}
        assert "chat template takes too long" in answers[0].json()["error"]["message"]
        assert (await http.post(COMPLETIONS, json=prompt(max_tokens=1))).status_code == 200


async def test_a_template_that_did_not_stand_its_trial_is_never_rendered(
    engine: Engine, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, VOCAB, template=ENDLESS)
    tokenizer = Tokenizer(tmp_path)
    tokenizer.template.unusable = "it takes more than 5 s"
    async with serving(engine.client, tokenizer) as (_, http):
        status, error = await refusal(http, chat())
    assert (status, error["param"]) == (400, "messages")
    assert "is not used, because it takes more than 5 s; use /v1/completions" in error["message"]


async def test_a_template_that_renders_nothing_makes_no_prompt(
    engine: Engine, tmp_path: Path
) -> None:
    async with with_template(engine, tmp_path, "{{ '' }}") as http:
        status, error = await refusal(http, chat())
    assert (status, error["param"]) == (400, "messages")
    assert error["message"] == "The prompt is empty."
