from typing import Any

import httpx2
import pytest

from server.config import LimitsSection
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.server.harness import CHAT, COMPLETIONS, ids_of, own_engine, posted

MAX_MESSAGES = LimitsSection().max_messages
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]


async def post(http: httpx2.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    return await posted(http, path, body)


@pytest.mark.parametrize("name", ["prompt", "content"])
async def test_a_text_has_the_tokens_that_a_completion_reads(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, name: str
) -> None:
    text = "<|im_start|>Once é"
    found = await post(http, "/tokenize", **{name: text})
    ids = ids_of(tokenizer, text)
    assert found == {"count": len(ids), "max_model_len": 400, "tokens": ids, "token_strs": None}
    read = await post(http, COMPLETIONS, prompt=text, max_tokens=1)
    assert read["usage"]["prompt_tokens"] == found["count"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
async def test_messages_have_the_tokens_that_a_chat_reads(
    http: httpx2.AsyncClient, fields: dict[str, Any]
) -> None:
    found = await post(http, "/tokenize", messages=MESSAGES, **fields)
    read = await post(http, CHAT, messages=MESSAGES, max_tokens=1, **fields)
    assert read["usage"]["prompt_tokens"] == found["count"] == len(found["tokens"])


async def test_messages_alone_have_no_beginning_of_an_answer(http: httpx2.AsyncClient) -> None:
    whole = await post(http, "/tokenize", messages=MESSAGES, add_generation_prompt=True)
    alone = await post(http, "/tokenize", messages=MESSAGES, add_generation_prompt=False)
    assert whole["tokens"][: alone["count"]] == alone["tokens"]
    rest = await post(http, "/detokenize", tokens=whole["tokens"][alone["count"] :])
    assert rest["prompt"] == "<|im_start|>assistant\n"


async def test_tokens_may_be_shown_as_text(http: httpx2.AsyncClient) -> None:
    found = await post(http, "/tokenize", prompt="a <|im_end|>é", return_token_strs=True)
    half = "\N{REPLACEMENT CHARACTER}"
    assert found["token_strs"] == ["a", " ", "<|im_end|>", half, half]


@pytest.mark.parametrize("text", ["", "naïve 😀", "<|im_start|>user\n<think>", "x" * 1000])
async def test_a_text_comes_back_from_its_tokens(http: httpx2.AsyncClient, text: str) -> None:
    found = await post(http, "/tokenize", prompt=text)
    assert found["count"] == len(found["tokens"])
    back = await post(http, "/detokenize", tokens=found["tokens"])
    assert back == {"prompt": text, "content": text}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, None),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, None),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt-5"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "tool", "content": [5]}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "content": "a"}, 400, None),
        ("/tokenize", {"content": [1]}, 400, "content"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}] * (MAX_MESSAGES + 1)}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "tools": TOOLS}, 400, "tools"),
        ("/tokenize", {"messages": MESSAGES, "tools": TOOLS * 2}, 400, "tools[1].function.name"),
        ("/tokenize", {"messages": MESSAGES, "parse_special": "no"}, 400, "parse_special"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_special_tokens": True},
            400,
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, 400, "with_pieces"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, VOCAB]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "gpt-5"}, 404, "model"),
    ],
)
async def test_bad_input_is_refused_with_the_name_of_its_parameter(
    http: httpx2.AsyncClient, path: str, body: Any, status: int, param: str | None
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_the_engine_is_not_needed(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer) as (engine, _, http):
        engine.stop()
        found = await post(http, "/tokenize", prompt="ab")
        assert (await post(http, "/detokenize", tokens=found["tokens"]))["prompt"] == "ab"
