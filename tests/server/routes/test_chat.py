import asyncio
import json
import re
import threading
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs
from tokenizers import Encoding

from server.config import Config, LimitsSection
from server.routes.service import ENCODED_AT_ONCE
from server.text.chat_template import ChatTemplate
from server.text.conversation import Thinking, Turn
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Connection,
    Engine,
    chat,
    events,
    eventually,
    finish_of,
    ids_of,
    own_engine,
    posted,
    prompt,
    recalled_text,
    serving,
    streamed,
    talk,
)

CONTEXT = 400  # tokens; see tests.engines


async def answer(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    return await posted(http, CHAT, chat(**fields))


async def stream(http: httpx2.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await http.post(CHAT, json=chat(stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def refusal(http: httpx2.AsyncClient, body: Any) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    response = await http.post(CHAT, content=content)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error


# --- what is answered ------------------------------------------------------------------------


async def test_the_answer_is_what_the_model_says(
    http: httpx2.AsyncClient, tokenizer: Tokenizer
) -> None:
    ids = (await tokenizer.encode_chat(talk())).ids
    found = await answer(http, text="Hello", max_tokens=12)
    (choice,) = found["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == recalled_text(tokenizer, ids, 12)
    assert choice["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert found["usage"]["completion_tokens"] == 12
    assert found["usage"]["total_tokens"] == len(ids) + 12
    assert (found["object"], found["model"]) == ("chat.completion", MODEL)


async def test_a_stream_says_the_same_piece_by_piece(http: httpx2.AsyncClient) -> None:
    whole = await answer(http, max_tokens=30)
    chunks = await stream(http, max_tokens=30)
    assert streamed(chunks) == whole["choices"][0]["message"]["content"]
    assert finish_of(chunks) == "length"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] is not None
    assert not any("usage" in chunk for chunk in chunks)


async def test_usage_is_streamed_last_where_it_was_asked_for(http: httpx2.AsyncClient) -> None:
    fields: dict[str, Any] = {"max_tokens": 5, "cache_salt": "the same prefix twice"}
    await answer(http, **fields)
    whole = await answer(http, **fields)
    *chunks, last = await stream(http, **fields, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]


async def test_two_answers_have_two_names(http: httpx2.AsyncClient) -> None:
    first, second = await answer(http, max_tokens=1), await answer(http, max_tokens=1)
    assert first["id"] != second["id"]
    assert first["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("model", [None, MODEL, "org/alias", "/models/alias"])
async def test_any_name_of_the_model_will_do(http: httpx2.AsyncClient, model: str | None) -> None:
    assert (await answer(http, model=model, max_tokens=1))["model"] == MODEL


@pytest.mark.parametrize(
    "length",
    [
        {"max_tokens": 7},
        {"max_completion_tokens": 7},
        {"max_tokens": 300, "max_completion_tokens": 7},
    ],
)
async def test_an_answer_has_at_most_the_tokens_that_were_asked_for(
    http: httpx2.AsyncClient, length: dict[str, int]
) -> None:
    found = await answer(http, **length)
    assert found["usage"]["completion_tokens"] == 7
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("length", [{}, {"max_tokens": -1}, {"max_tokens": 2**31 - 1}])
async def test_an_answer_without_a_limit_ends_with_the_context(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, length: dict[str, int]
) -> None:
    engine.script[:] = ids_of(tokenizer, "x") * CONTEXT
    found = await answer(http, **length)
    assert found["usage"]["total_tokens"] == CONTEXT
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("length", [0, -2, 2**31, 1.5, True, "7"])
async def test_a_length_that_makes_no_sense_is_refused(
    http: httpx2.AsyncClient, length: Any
) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        status, error = await refusal(http, chat(**{name: length}))
        assert (status, error["param"]) == (400, name)


async def test_the_end_of_the_turn_ends_the_answer_and_is_no_part_of_it(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "Hello.<|im_end|>more")
    found = await answer(http)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "Hello."
    assert choice["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == len("Hello.") + 1


async def test_a_seed_repeats_an_answer(http: httpx2.AsyncClient) -> None:
    async def said(seed: int) -> str:
        found = await answer(http, temperature=1, seed=seed, max_tokens=20)
        text: str = found["choices"][0]["message"]["content"]
        return text

    assert await said(1) == await said(1)
    assert await said(1) != await said(2)


async def test_what_the_request_leaves_out_is_as_the_model_recommends(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    async with serving(engine.client, tokenizer, defaults={"temperature": 0.0}) as (_, http):
        greedy = await answer(http, max_tokens=20)
        silent = await answer(http, max_tokens=20, temperature=None)
        warm = await answer(http, max_tokens=20, temperature=2, seed=5)
    assert silent["choices"] == greedy["choices"]
    assert warm["choices"] != greedy["choices"]


async def test_log_probabilities_cover_every_token(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "né!")
    found = await answer(http, max_tokens=4, logprobs=True, top_logprobs=2)
    entries = found["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "né!"
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]  # greedy: the likeliest
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] < 0
    chunks = await stream(http, max_tokens=4, logprobs=True, top_logprobs=2)
    logprobs = [c["choices"][0]["logprobs"] for c in chunks]
    assert [entry for part in logprobs if part for entry in part["content"]] == entries


async def test_a_bias_moves_the_answer(http: httpx2.AsyncClient, tokenizer: Tokenizer) -> None:
    (token,) = ids_of(tokenizer, "Z")
    found = await answer(http, max_tokens=3, logit_bias={str(token): 100})
    assert found["choices"][0]["message"]["content"] == "ZZZ"


# --- stop strings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "stop", "content", "finish"),
    [
        ("one STOP two", "STOP", "one ", "stop"),
        ("one STOP two", ["two", "STOP"], "one ", "stop"),
        ("one STO two", "STOP", "one STO two", "length"),
        ("STOP", "STOP", "", "stop"),
        ("ends with STO", "STOP", "ends with STO", "length"),
        ("a€b", "€", "a", "stop"),
        ("one STOP", ["P"], "one STO", "stop"),
        ("<think>a STOP b</think>c STOP", "STOP", "c ", "stop"),
    ],
)
@pytest.mark.parametrize("as_stream", [False, True])
async def test_a_stop_string_is_never_sent(
    engine: Engine,
    tokenizer: Tokenizer,
    http: httpx2.AsyncClient,
    says: str,
    stop: Any,
    content: str,
    finish: str,
    as_stream: bool,
) -> None:
    engine.script[:] = ids_of(tokenizer, says)
    fields = {"stop": stop, "max_tokens": len(engine.script)}
    if as_stream:
        chunks = await stream(http, **fields)
        assert (streamed(chunks), finish_of(chunks)) == (content, finish)
    else:
        (choice,) = (await answer(http, **fields))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, finish)


async def test_a_stop_string_ends_the_work_as_well(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "one STOP" + "x" * 350)
    found = await answer(http, stop="STOP")
    assert found["usage"]["completion_tokens"] == len("one STOP")
    await eventually(lambda: engine.client.in_flight == 0)
    await eventually(lambda: engine.client.stats.running == 0)


# --- thoughts --------------------------------------------------------------------------------


async def test_thoughts_are_kept_apart_from_the_answer(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "<think>\nHm.\n</think>\n\nYes.<|im_end|>")
    found = await answer(http)
    message = found["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message["reasoning_content"] == message["reasoning"] == "Hm."
    thought = len("\nHm.\n") + 1  # with the closing tag
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    chunks = await stream(http)
    assert streamed(chunks) == "Yes."
    assert streamed(chunks, "reasoning_content") == "Hm."
    assert streamed(chunks, "reasoning") == "Hm."


async def test_a_thought_that_is_cut_off_is_no_answer(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "<think>Let me see")
    (choice,) = (await answer(http, max_tokens=8))["choices"]
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning"] == "Let me"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "switch",
    [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}],
)
async def test_thinking_can_be_turned_off(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, switch: dict[str, Any]
) -> None:
    engine.script[:] = ids_of(tokenizer, "Yes.<|im_end|>")
    found = await answer(http, **switch)
    without = (await tokenizer.encode_chat(talk(thinking=Thinking(enabled=False)))).ids
    plain = (await tokenizer.encode_chat(talk())).ids
    assert found["usage"]["prompt_tokens"] == len(without) > len(plain)
    assert found["choices"][0]["message"]["content"] == "Yes."
    assert "reasoning" not in found["choices"][0]["message"]


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (chat(model="gpt-5"), 404, "model"),
        (chat(model=5), 400, "model"),
        ({}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
        (chat(temperature=float("nan")), 400, "temperature"),
        (chat(top_p=float("inf")), 400, "top_p"),
        ('{"temperature": 1e400, "messages": [{"role": "user"}]}', 400, "temperature"),
        (chat("\ud800"), 400, "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, None),
        (chat(n=9), 400, "n"),
        (chat(seed=10**30), 400, "seed"),
        (chat(top_k=-5), 400, "top_k"),
        (chat(logit_bias={"1000": 1}), 400, "logit_bias"),
        (
            chat(chat_template_kwargs={"enable_thinking": "no"}),
            400,
            "chat_template_kwargs.enable_thinking",
        ),
        (chat(stream_options={"include_usage": True}), 400, "stream_options"),
        (chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), 400, "tools[0]"),
        ("", 400, None),
        ("[]", 400, None),
        ("{" * 100_000, 400, None),
    ],
)
async def test_bad_input_is_refused_with_the_name_of_its_parameter(
    http: httpx2.AsyncClient, body: Any, status: int, param: str | None
) -> None:
    found, error = await refusal(http, body)
    assert (found, error["param"]) == (status, param)
    assert error["message"]


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


async def test_a_full_queue_says_when_to_try_again(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer, closed=True, max_num_seqs=1, max_queue=1) as served:
        engine, app, http = served
        held = [Connection(app, CHAT, chat(max_tokens=2)) for _ in range(2)]
        await eventually(lambda: engine.client.in_flight == 2)
        response = await http.post(CHAT, json=chat())
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
        engine.gate.open()
        for connection in held:
            await connection.end()
            assert connection.status == 200
        assert (await http.post(CHAT, json=chat(max_tokens=1))).status_code == 200


async def test_an_engine_that_has_ended_is_a_503(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer) as (engine, _, http):
        engine.stop()
        response = await http.post(CHAT, json=chat())
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"


def give_template(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, text: str) -> None:
    files = replace(tokenizer.template._files, templates=text)
    monkeypatch.setattr(tokenizer.template, "_files", files)


async def test_a_model_without_a_template_refuses_chats(
    tokenizer: Tokenizer, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer.template, "exists", False)
    status, error = await refusal(http, chat())
    assert (status, error["param"]) == (400, "messages")
    assert "/v1/completions" in error["message"]


async def test_messages_that_the_template_cannot_render_are_refused(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_template(monkeypatch, tokenizer, "{{ raise_exception('no') }}")
    status, error = await refusal(http, chat())
    assert (status, error["param"]) == (400, "messages")
    assert error["message"].endswith("cannot render these messages: no.")
    counted = await http.post("/v1/messages/count_tokens", json={"messages": chat()["messages"]})
    assert counted.status_code == 400


async def test_the_reason_of_a_template_that_fails_is_in_the_log_and_nothing_of_the_messages(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = "{{ '' }}\n{{ raise_exception('no ' ~ messages[0].content) }}"
    give_template(monkeypatch, tokenizer, failing)
    with capture_logs() as entries:
        await refusal(http, chat("zebra"))
    (said,) = [entry for entry in entries if entry["log_level"] == "warning"]
    assert (said["event"], said["reason"]) == (
        "the chat template failed",
        "TemplateError in line 2",
    )
    assert "zebra" not in str(entries)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_threat_19_an_endless_template_is_ended_and_others_are_answered(
    path: str, engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are encoded at once."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    give_template(monkeypatch, tokenizer, endless)
    config = Config(limits=LimitsSection(max_template_s=0.2))
    async with serving(engine.client, tokenizer, config) as (_, http):
        asking = [http.post(path, json=chat(), timeout=60) for _ in range(ENCODED_AT_ONCE + 4)]
        waiting = asyncio.gather(*asking)
        assert (await http.get("/health")).status_code == 200
        answers = await waiting
        assert {answer.status_code for answer in answers} == {400}
        assert "chat template takes too long" in answers[0].json()["error"]["message"]
        assert (await http.post(COMPLETIONS, json=prompt(max_tokens=1))).status_code == 200
        monkeypatch.undo()
        assert (await http.post(path, json=chat(max_tokens=1))).status_code == 200


async def test_a_template_that_did_not_stand_its_trial_is_never_rendered(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer.template, "unusable", "it takes more than 5 s")
    monkeypatch.delattr(ChatTemplate, "_render")
    status, error = await refusal(http, chat())
    assert (status, error["param"]) == (400, "messages")
    assert "is not used, because it takes more than 5 s; use /v1/completions" in error["message"]


async def test_a_template_that_renders_nothing_makes_no_prompt(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_template(monkeypatch, tokenizer, "{{ '' }}")
    status, error = await refusal(http, chat())
    assert (status, error["param"]) == (400, "messages")
    assert error["message"] == "The prompt is empty."


async def test_other_requests_are_answered_while_a_prompt_is_encoded(
    engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, finish = threading.Event(), threading.Event()
    encode = tokenizer._encoder.encode

    def slow(texts: list[str], **how: Any) -> list[Encoding]:
        begun.set()
        assert finish.wait(20), "the event loop stood still"
        return encode(texts, **how)

    monkeypatch.setattr(tokenizer._encoder, "encode", slow)
    async with serving(engine.client, tokenizer) as (app, http):
        connection = Connection(app, CHAT, chat(max_tokens=1))
        await eventually(begun.is_set)
        assert (await http.get("/health")).status_code == 200
        assert connection.status is None
        finish.set()
        await connection.end()
        assert connection.status == 200
