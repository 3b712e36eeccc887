"""Answers that a client has begun, at every door."""

import json
from typing import Any

import httpx2
import pytest

from engine.types import Request
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, END, Engine, ids_of, posted

MESSAGES, RESPONSES, TOKENIZE = "/v1/messages", "/v1/responses", "/tokenize"
ASKED = [{"role": "user", "content": "Hello"}]
PROMPT = f"<|im_start|>user\nHello{END}\n<|im_start|>assistant\n"
SILENT = "<think>\n\n</think>\n\n"
CONTINUED = {"continue_final_message": True}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMA_FORM = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}


def begun(content: Any = "Once", **fields: Any) -> list[dict[str, Any]]:
    """A conversation that ends with the beginning of an answer."""
    return [*ASKED, {"role": "assistant", "content": content} | fields]


def body(path: str, turns: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A greedy request for the answer that the turns begin; of a few tokens, unless it says so."""
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    asked: dict[str, Any] = {"temperature": 0, length: 8} | fields
    asked["input" if path == RESPONSES else "messages"] = turns
    return asked if path == MESSAGES else CONTINUED | asked


async def refused(http: httpx2.AsyncClient, path: str, asked: dict[str, Any]) -> tuple[str, str]:
    """The parameter and the message of the 400."""
    error = (await posted(http, path, asked, status=400))["error"]
    return error.get("param"), error["message"]


# --- the same tokens everywhere ---------------------------------------------------------------


async def test_what_is_begun_counts_as_prompt_wherever_it_is_counted(
    http: httpx2.AsyncClient,
) -> None:
    turns = begun("Once upon a")
    count = (await posted(http, TOKENIZE, {"messages": turns} | CONTINUED))["count"]
    usage = (await posted(http, CHAT, body(CHAT, turns)))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (count, 8)
    asked = {"input": turns} | CONTINUED
    assert (await posted(http, f"{RESPONSES}/input_tokens", asked))["input_tokens"] == count
    assert (await posted(http, RESPONSES, asked))["usage"]["input_tokens"] == count
    asked = {"messages": turns}
    assert (await posted(http, f"{MESSAGES}/count_tokens", asked))["input_tokens"] == count
    found = (await posted(http, MESSAGES, asked | {"max_tokens": 1, "cache_salt": "new"}))["usage"]
    assert count == sum(value for name, value in found.items() if name.endswith("input_tokens"))


async def test_a_stored_answer_is_one_turn_with_what_it_goes_on_with(
    http: httpx2.AsyncClient, engine: Engine, tokenizer: Tokenizer, submitted: list[Request]
) -> None:
    engine.script[:] = ids_of(tokenizer, f" upon{END}")
    first = await posted(http, RESPONSES, body(RESPONSES, begun("Once")))
    engine.script[:] = ids_of(tokenizer, f" a time{END}")
    # The stored answer itself is gone on with.
    link = {"previous_response_id": first["id"]}
    second = await posted(http, RESPONSES, body(RESPONSES, []) | link)
    link = {"previous_response_id": second["id"], "continue_final_message": None}
    question = [{"role": "user", "content": "And?"}]
    third = await posted(http, RESPONSES, body(RESPONSES, question) | link)
    assert third["status"] == "completed"
    texts = [
        tokenizer.fast.decode(list(r.prompt_ids), skip_special_tokens=False) for r in submitted
    ]
    assert texts[1] == f"{PROMPT}{SILENT}Once upon"
    assert f"assistant\nOnce upon a time{END}\n<|im_start|>user\nAnd?" in texts[2]


# --- thoughts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "fields", "opening"),
    [
        ({"content": "Once"}, {}, f"{SILENT}Once"),
        ({"content": "Once", "reasoning_content": "Hm."}, {}, "<think>\nHm.\n</think>\n\nOnce"),
        ({"content": "", "reasoning_content": "Hm. "}, {}, "<think>\nHm. "),
        ({"content": "<think>\nHm.\n</think>\n\nOnce"}, {}, "<think>\nHm.\n</think>\n\nOnce"),
        ({"content": "<think>\nHm"}, {}, "<think>\nHm"),
        ({"content": "<think>\n"}, {}, "<think>\n"),
        ({"content": SILENT}, {}, SILENT),
        ({"content": ""}, {}, ""),
        ({"content": "Once"}, {"enable_thinking": False}, f"{SILENT}Once"),
        (
            {"content": "Once", "reasoning_content": "Hm."},
            {"enable_thinking": False},
            f"{SILENT}Once",
        ),
        ({"content": "", "reasoning_content": "Hm."}, {"enable_thinking": False}, SILENT),
    ],
)
async def test_the_prompt_ends_as_the_model_would_have_written_it(
    http: httpx2.AsyncClient,
    tokenizer: Tokenizer,
    message: dict[str, Any],
    fields: dict[str, Any],
    opening: str,
) -> None:
    turns = [*ASKED, {"role": "assistant"} | message]
    found = await posted(http, TOKENIZE, {"messages": turns} | CONTINUED | fields)
    assert found["tokens"] == ids_of(tokenizer, PROMPT + opening)


# --- forms and calls --------------------------------------------------------------------------


async def test_all_choices_go_on_with_a_form(http: httpx2.AsyncClient) -> None:
    asked = body(CHAT, begun('{"a": 5'), **SCHEMA_FORM, n=3, max_tokens=40)
    found = await posted(http, CHAT, asked | {"temperature": 1.0})
    for choice in found["choices"]:
        assert str(json.loads('{"a": 5' + choice["message"]["content"])["a"]).startswith("5")


@pytest.mark.parametrize("text", ['{"b', '{"a": 1} ', "<tool_", "<think>a</think>b"])
async def test_what_does_not_fit_the_form_is_refused(http: httpx2.AsyncClient, text: str) -> None:
    asked = body(CHAT, begun(text), **SCHEMA_FORM, tools=TOOLS)
    param, message = await refused(http, CHAT, asked)
    assert param == "messages"
    assert "does not fit its form (response_format" in message


CALL = '<tool_call>\n{"name": "look", "arguments": {"a": "'


@pytest.mark.parametrize("text", ["<tool_call>", CALL, f"Hm.\n{CALL}x"])
async def test_a_call_cannot_be_begun_in_text(http: httpx2.AsyncClient, text: str) -> None:
    param, message = await refused(http, CHAT, body(CHAT, begun(text), tools=TOOLS))
    assert (param, "A call cannot be begun" in message) == ("messages", True)
    await posted(http, CHAT, body(CHAT, begun(text)))


@pytest.mark.parametrize(
    "text", ["The tag <tool_call> opens", CALL + '"}}\n</tool_call>', "a <", "<tool_call>" * 20]
)
async def test_text_that_is_no_open_call_may_be_begun(http: httpx2.AsyncClient, text: str) -> None:
    asked = body(CHAT, begun(text), tools=TOOLS)
    if text.endswith("<tool_call>"):
        await refused(http, CHAT, asked)
    else:
        await posted(http, CHAT, asked)


# --- what cannot be continued -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"messages": ASKED}, "continue_final_message"),
        ({"messages": begun(), "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": begun(tool_calls=[{"function": {"name": "look"}}])}, "messages"),
        ({"prompt": "a"}, "continue_final_message"),
    ],
)
async def test_what_cannot_be_continued_has_no_tokens(
    http: httpx2.AsyncClient, asked: dict[str, Any], param: str
) -> None:
    assert (await refused(http, TOKENIZE, asked | CONTINUED))[0] == param


async def test_a_call_that_must_be_made_does_not_continue_a_text(http: httpx2.AsyncClient) -> None:
    asked = body(CHAT, begun(), tools=TOOLS, tool_choice="required")
    assert (await refused(http, CHAT, asked))[0] == "messages"
