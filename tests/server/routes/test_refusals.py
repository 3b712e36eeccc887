"""What both endpoints refuse, parameter by parameter."""

import json
from typing import Any

import httpx2
import pytest

from server.config import LimitsSection
from server.protocol.common import MAX_LOGIT_BIASES, MAX_STOP_STRING_CHARS
from tests.server.harness import CHAT, COMPLETIONS, Engine, chat, prompt

LIMITS = LimitsSection()
BODIES = {CHAT: chat, COMPLETIONS: prompt}
COUNTS = ("max_tokens", "top_k", "seed", "n")
NUMBERS = (
    *COUNTS,
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
CHAT_COUNTS = ("max_completion_tokens", "top_logprobs")
COMPLETION_COUNTS = ("logprobs",)
# As they are written: several of them no JSON library would write.
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"1"', "true", "[]", "{}", "[1]")
TOO_BIG = (str(2**70), str(-(2**70)), "1" + "0" * 400, "-1" + "0" * 400)
NAMED = [
    *[(path, name) for path in BODIES for name in NUMBERS],
    *[(CHAT, name) for name in CHAT_COUNTS],
    *[(COMPLETIONS, name) for name in COMPLETION_COUNTS],
]
SECRET = "zebra-canary"


async def refusal(http: httpx2.AsyncClient, path: str, content: str | bytes) -> dict[str, Any]:
    """The error; its status is 400."""
    response = await http.post(path, content=content)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000
    return error


def raw(path: str, name: str, value: str) -> str:
    """A body with a field exactly as it is written here."""
    body = {key: field for key, field in BODIES[path]().items() if key != name}
    return json.dumps(body)[:-1] + f', "{name}": {value}}}'


@pytest.mark.parametrize(("path", "name"), NAMED)
async def test_what_is_no_number_or_too_big_is_named(
    http: httpx2.AsyncClient, path: str, name: str
) -> None:
    for value in (*NO_NUMBERS, *TOO_BIG):
        content = raw(path, name, value)
        if name == "top_logprobs":
            content = content[:-1] + ', "logprobs": true}'
        assert (await refusal(http, path, content))["param"] == name, value


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", '"yes"'),
        ("stream", "1"),
        ("stream_options", "[]"),
        ("model", "5"),
        ("stop", "5"),
        ("stop", "[5]"),
        ("stop", '""'),
        ("stop", '["a", ""]'),
        ("stop", json.dumps(["a"] * (LIMITS.max_stop_strings + 1))),
        ("stop", json.dumps("x" * (MAX_STOP_STRING_CHARS + 1))),
        ("logit_bias", "[]"),
        ("logit_bias", '{"5": "1"}'),
        ("logit_bias", '{"5": 1e400}'),
        ("logit_bias", '{"5": NaN}'),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", '{"\\u0665": 1}'),
        ("logit_bias", '{"' + "9" * 5000 + '": 1}'),
        ("logit_bias", json.dumps(dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1))),
        ("temperature", "-0.1"),
        ("temperature", "2.1"),
        ("top_p", "-0.1"),
        ("top_p", "1.1"),
        ("min_p", "-1"),
        ("presence_penalty", "-2.1"),
        ("frequency_penalty", "2.1"),
        ("repetition_penalty", "0"),
        ("max_tokens", "1.5"),
        ("n", "0"),
        ("cache_salt", '""'),
        ("cache_salt", f'"{SECRET * 100}"'),
        ("cache_salt", f'["{SECRET}"]'),
        ("cache_report", f'"{SECRET}"'),
    ],
)
async def test_a_value_of_the_wrong_type_or_size_is_named(
    http: httpx2.AsyncClient, path: str, name: str, value: str
) -> None:
    error = await refusal(http, path, raw(path, name, value))
    assert error["param"] == name
    assert SECRET not in error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_the_key_of_a_bias_that_is_wrong_is_said(http: httpx2.AsyncClient, path: str) -> None:
    for key, amount in (("1000000", "1"), ("many", "1"), ("5", "101")):
        content = raw(path, "logit_bias", f'{{"0": 1, "{key}": {amount}}}')
        assert f"'{key}'" in (await refusal(http, path, content))["message"]


async def test_a_prompt_that_is_none_is_refused_in_one_sentence(http: httpx2.AsyncClient) -> None:
    for value in ("5", "null", "{}", '["a", 5]', "[[1], 5]", "[true]"):
        message = (await refusal(http, COMPLETIONS, raw(COMPLETIONS, "prompt", value)))["message"]
        assert message.count("prompt") == 1, message


async def test_other_options_of_a_stream_are_ignored(
    http: httpx2.AsyncClient,
) -> None:
    body = prompt(stream=True, stream_options={"continuous_usage_stats": True}, max_tokens=1)
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "functions", [{"name": SECRET}]),
        (CHAT, "audio", {"voice": SECRET}),
        (CHAT, "bad_words", [SECRET]),
        (CHAT, "chat_template", SECRET),
        (COMPLETIONS, "guided_regex", SECRET),
        (CHAT, "n", LIMITS.max_choices + 1),
        (CHAT, "top_logprobs", 5),
        (CHAT, "chat_template_kwargs.thinking_budget", {"thinking_budget": 5}),
        (COMPLETIONS, "suffix", SECRET),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "n", LIMITS.max_choices + 1),
        (COMPLETIONS, "logprobs", 6),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    http: httpx2.AsyncClient, path: str, name: str, value: Any
) -> None:
    error = await refusal(http, path, json.dumps(BODIES[path]() | {name.partition(".")[0]: value}))
    assert error["param"] == name
    assert SECRET not in error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls"),
        ("Hello", "messages[0]"),
    ],
)
async def test_the_place_inside_of_the_messages_is_named(
    http: httpx2.AsyncClient, message: Any, param: str
) -> None:
    error = await refusal(http, CHAT, json.dumps({"messages": [message]}))
    assert error["param"] == param


async def test_too_many_messages_are_refused(http: httpx2.AsyncClient) -> None:
    messages = chat("")["messages"] * (LIMITS.max_messages + 1)
    error = await refusal(http, CHAT, json.dumps({"messages": messages}))
    assert error["param"] == "messages"
    assert str(LIMITS.max_messages) in error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"model": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe{\x00}\x00",
    ],
)
async def test_a_body_that_is_no_object_of_json_is_refused(
    http: httpx2.AsyncClient, path: str, content: bytes
) -> None:
    await refusal(http, path, content)


@pytest.mark.parametrize("path", BODIES)
async def test_fields_that_cannot_change_the_answer_are_ignored(
    http: httpx2.AsyncClient, path: str
) -> None:
    body = BODIES[path](max_tokens=5)
    plain = (await http.post(path, json=body)).json()["choices"]
    extra = {"user": "me", "metadata": {"a": 1}, "store": False, SECRET: [None]}
    response = await http.post(path, json=body | extra)
    assert (response.status_code, response.json()["choices"]) == (200, plain)


@pytest.mark.parametrize("path", BODIES)
async def test_of_a_field_that_comes_twice_the_last_one_counts(
    http: httpx2.AsyncClient, path: str
) -> None:
    start = json.dumps(BODIES[path]())[:-1]
    response = await http.post(path, content=start + ', "max_tokens": 0, "max_tokens": 2}')
    assert response.json()["usage"]["completion_tokens"] == 2
    error = await refusal(http, path, start + ', "max_tokens": 2, "max_tokens": 0}')
    assert error["param"] == "max_tokens"


@pytest.mark.parametrize("path", BODIES)
async def test_null_is_as_if_the_field_were_not_there(http: httpx2.AsyncClient, path: str) -> None:
    names = [name for where, name in NAMED if where == path and name != "temperature"]
    nothing = dict.fromkeys([*names, "stop", "stream", "stream_options", "model", "logit_bias"])
    body = BODIES[path](stop=["x"])
    assert (await http.post(path, json=body | nothing)).status_code == 200


async def test_nothing_of_what_is_refused_reaches_the_engine(
    engine: Engine, http: httpx2.AsyncClient
) -> None:
    last = engine.client._last_id
    for path, body in ((CHAT, chat(n=9)), (CHAT, chat(stop="")), (COMPLETIONS, prompt(n=9))):
        await refusal(http, path, json.dumps(body))
    assert engine.client._last_id == last
