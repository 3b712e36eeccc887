"""What clients write and models say is nowhere but in their own answers."""

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI

from server.cli.log import configure_log
from server.config import LogSection
from server.routes.service import Service
from server.text.encoder import Encoder
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    Engine,
    Json,
    http_client,
    ids_of,
    own_engine,
    running,
    serving,
)

pytestmark = pytest.mark.usefixtures("own_log")
CANARY = re.compile(r"zebra[\w-]*canary", re.IGNORECASE)
HEADERS = {
    "authorization": "Bearer zebra-key-canary",
    "x-api-key": "zebra-xkey-canary",
    "user-agent": "zebra-agent-canary",
    "cookie": "a=zebra-cookie-canary",
    "x-request-id": "zebra id canary!",
    "anthropic-beta": "zebra-beta-canary",
}
TOOL = {
    "name": "zebra_tool_canary",
    "description": "zebra-description-canary",
    "parameters": {"type": "object", "properties": {"zebra-field-canary": {"type": "string"}}},
}
TURN = [{"role": "user", "content": "zebra-prompt-canary"}]
SYSTEM = {"role": "system", "content": "zebra-system-canary"}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]
MESSAGES_TOOLS = [TOOL | {"input_schema": TOOL["parameters"]}]
del MESSAGES_TOOLS[0]["parameters"]
SCHEMA = {"type": "object", "properties": {"zebra-schema-canary": {"const": "zebra-const-canary"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "zebra-name-canary", "schema": SCHEMA}}
COMMON: Json = {"max_tokens": 2, "temperature": 0, "user": "zebra-user-canary"}
TWO_TOKENS = {"num_predict": 2, "stop": ["zebra-stop-canary"], "zebra-option-canary": 1}
BODIES: list[tuple[str, Json]] = [
    (CHAT, COMMON | {"messages": [SYSTEM, *TURN], "stop": ["zebra-stop-canary"]}),
    (CHAT, COMMON | {"messages": TURN, "cache_salt": "zebra-salt-canary", "logprobs": True}),
    (CHAT, COMMON | {"messages": TURN, "tools": CHAT_TOOLS, "tool_choice": "auto"}),
    (CHAT, COMMON | {"messages": TURN, "response_format": FORMAT}),
    (CHAT, COMMON | {"messages": TURN, "metadata": {"zebra-meta-canary": "zebra-value-canary"}}),
    (COMPLETIONS, COMMON | {"prompt": ["zebra-one-canary", "zebra-two-canary"], "echo": True}),
    (
        "/v1/responses",
        {
            "input": "zebra-input-canary",
            "instructions": "zebra-system-canary",
            "max_output_tokens": 2,
        },
    ),
    (
        "/v1/messages",
        {"model": "recall", "max_tokens": 2, "messages": TURN, "system": "zebra-system-canary"},
    ),
    (
        "/v1/messages",
        {"model": "recall", "max_tokens": 2, "messages": TURN, "tools": MESSAGES_TOOLS},
    ),
    ("/v1/messages/count_tokens", {"model": "recall", "messages": TURN}),
    ("/api/chat", {"messages": [SYSTEM, *TURN], "tools": CHAT_TOOLS, "options": TWO_TOKENS}),
    ("/api/chat", {"messages": TURN, "format": SCHEMA, "think": False, "options": TWO_TOKENS}),
    ("/api/generate", {"prompt": "zebra-prompt-canary", "raw": True, "options": TWO_TOKENS}),
    ("/api/embed", {"input": ["zebra-input-canary"]}),
    ("/api/show", {"model": "zebra-model-canary"}),
    ("/tokenize", {"prompt": "zebra-text-canary", "return_token_strs": True}),
    ("/v1/embeddings", {"input": ["zebra-input-canary"], "model": "recall"}),
]
PATHS = sorted({path for path, _ in BODIES})
MALFORMED: list[bytes] = [
    b'{"messages": "zebra-cut-canary',
    b'{"zebra-unknown-canary": 1, "prompt": {"zebra-nested-canary": []}, "input": {}}',
    b'{"messages": [{"role": "zebra-role-canary", "content": "zebra-prompt-canary"}]}',
    b'{"model": "zebra-model-canary", "messages": 7, "prompt": 7.5, "input": 7}',
    b'{"stop": [{"zebra-stop-canary": 1}], "messages": [], "prompt": ""}',
    b'{"tools": [{"type": "zebra-type-canary", "function": "zebra-function-canary"}]}',
    b'"zebra-string-canary \xff\xfe"',
    b'{"prompt": "zebra-surrogate-canary \\ud800", "messages": "\\ud800"}',
    b'{"response_format": {"type": "json_schema", "json_schema": "zebra-schema-canary"}}',
]


@pytest.fixture
async def app(engine: Engine, tokenizer: Tokenizer) -> AsyncIterator[FastAPI]:
    """Its model says a canary, too."""
    engine.script.extend(ids_of(tokenizer, "zebra-answer-canary"))
    async with serving(engine.client, tokenizer) as (app, _):
        yield app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(app) as client:
        client.headers.update(HEADERS)
        yield client


def log_everything() -> None:
    """All there is to log, but for the client of these tests, which says what it asks for."""
    configure_log(LogSection(level="debug", format="json"))
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)


async def ask_everything(http: httpx2.AsyncClient) -> list[httpx2.Response]:
    answers = []
    for path, body in BODIES:
        for stream in (False, True):
            answers.append(await http.post(path, json=body | {"stream": stream}))
            answers.append(await http.post(path, json=body))
    for path in PATHS:
        answers += [await http.post(path, content=content) for content in MALFORMED]
        answers.append(await http.request("ZEBRACANARY", f"{path}?zebra-query-canary=1"))
    for path in (
        "/zebra-path-canary",
        "/v1/models/zebra-model-canary",
        "/v1/responses/zebra-canary",
    ):
        answers.append(await http.get(f"{path}?q=zebra-query-canary"))
    return answers


def nowhere(*texts: str) -> None:
    for text in texts:
        assert (found := CANARY.search(text)) is None, text[max(0, found.start() - 200) :][:400]


async def test_threat_17_what_clients_write_and_models_say_is_in_no_log_metric_or_others_error(
    http: httpx2.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    log_everything()
    answers = await ask_everything(http)
    statuses = {answer.status_code for answer in answers}
    assert {200, 400, 404, 405} <= statuses < {200, 400, 404, 405, 422}
    assert any("canary" in answer.text for answer in answers), "the model has said it"
    others = [await http.post(path, json={"nothing": 1}) for path in PATHS]
    scraped = await http.get("/metrics")
    written = capsys.readouterr()
    nowhere(written.out, written.err, scraped.text, *(answer.text for answer in others))
    said = [json.loads(line) for line in written.err.splitlines()]
    requests = [entry for entry in said if entry["event"] == "request"]
    assert len(requests) == len(answers) + len(others) + 1, "each one has left its line"
    assert {entry["level"] for entry in requests} == {"info", "debug"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages", "/tokenize"])
async def test_threat_17_a_bug_that_repeats_its_input_tells_it_nobody(
    path: str,
    http: httpx2.AsyncClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log_everything()

    def broken(self: Encoder, texts: list[str], **_: Any) -> Any:
        raise KeyError("".join(texts) + "zebra-bug-canary")

    monkeypatch.setattr(Encoder, "encode", broken)
    body = next(body for asked, body in BODIES if asked == path)
    response = await http.post(path, json=body)
    assert response.status_code == 500
    written = capsys.readouterr()
    nowhere(written.out, written.err, response.text)
    (bug,) = [e for e in map(json.loads, written.err.splitlines()) if e["level"] == "error"]
    assert bug["event"] == "request failed"
    assert bug["at"][0] == "KeyError"
    assert bug["request_id"] == response.headers["x-request-id"]


async def test_threat_17_a_step_that_fails_tells_nothing_of_its_requests(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    log_everything()
    async with own_engine(tokenizer, failing=ids_of(tokenizer, "q")[0]) as (_, _, http):
        body = COMMON | {"prompt": "zebra-q-canary"}
        response = await http.post(COMPLETIONS, json=body)
    assert response.status_code == 500
    written = capsys.readouterr()
    nowhere(written.out, written.err, response.text)
    assert "step failed" in written.err


async def test_threat_17_what_is_no_http_is_not_repeated(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    log_everything()
    listener = socket.create_server(("127.0.0.1", 0))
    async with running(service) as app:
        config = uvicorn.Config(app, http="h11", log_config=None, lifespan="off", access_log=False)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        for garbage in (
            b"zebra-canary\r\n\r\n",
            b"GET /zebra-canary HTTP/1.1\r\nzebra-canary\r\n\r\n",
            b"GET /zebra-path-canary?zebra-canary HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(garbage)
            assert await reader.read()
            writer.close()
            await writer.wait_closed()
        server.should_exit = True
        await serving
    written = capsys.readouterr()
    nowhere(written.out, written.err)
    assert '"endpoint": "none"' in written.err
