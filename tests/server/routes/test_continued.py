"""Answers that a client has begun, at every door."""

import json
from typing import Any

import httpx2
import pytest

from engine.types import Request
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, COMPLETIONS, END, Engine, events, ids_of, posted

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


def said(path: str, answer: dict[str, Any]) -> tuple[str, str]:
    """Thoughts and text of a whole answer."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return message.get("reasoning_content") or "", message["content"] or ""
    parts = answer["content" if path == MESSAGES else "output"]
    texts = {"thinking": "", "text": "", "reasoning": "", "message": ""}
    for part in parts:
        inner = part["content"] if path == RESPONSES else [part]
        texts[part["type"]] += "".join(one.get("text") or one.get("thinking", "") for one in inner)
    return texts["thinking"] + texts["reasoning"], texts["text"] + texts["message"]


def said_in_stream(path: str, text: str) -> str:
    """All text of a streamed answer."""
    if path in (CHAT, COMPLETIONS):
        choices = [choice for chunk in events(text) for choice in chunk["choices"]]
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == MESSAGES:
        return "".join(one["delta"].get("text", "") for one in data if "delta" in one)
    return "".join(one["delta"] for one in data if one["type"] == "response.output_text.delta")


# --- the same tokens everywhere ---------------------------------------------------------------


@pytest.mark.parametrize("text", ["Once upon a", "Once \n", "é{"])
@pytest.mark.parametrize("seed", [None, 7])
async def test_an_answer_is_continued_with_the_same_tokens_everywhere_as_its_prompt_by_ids(
    http: httpx2.AsyncClient, submitted: list[Request], text: str, seed: int | None
) -> None:
    drawn = {} if seed is None else {"seed": seed, "temperature": 1.0}
    turns = begun(text)
    ids = (await posted(http, TOKENIZE, {"messages": turns} | CONTINUED))["tokens"]
    by_ids = {"prompt": ids, "max_tokens": 8, "temperature": 0} | drawn
    plain = await posted(http, COMPLETIONS, by_ids)
    expected = plain["choices"][0]["text"]
    assert expected
    streamed = (await http.post(COMPLETIONS, json=by_ids | {"stream": True})).text
    assert said_in_stream(COMPLETIONS, streamed) == expected
    for path in (CHAT, RESPONSES, MESSAGES):
        asked = body(path, turns, **drawn)
        assert said(path, await posted(http, path, asked)) == ("", expected)
        streamed = (await http.post(path, json=asked | {"stream": True})).text
        assert said_in_stream(path, streamed) == expected
    assert {request.prompt_ids for request in submitted} == {tuple(ids)}
    assert len(submitted) == 8


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


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_the_message_itself_may_say_that_it_is_continued(
    http: httpx2.AsyncClient, submitted: list[Request], path: str
) -> None:
    await posted(http, path, body(path, begun()))
    for marked, fields in (
        (begun(prefix=True), {"continue_final_message": None}),
        (begun(prefix=True), {"continue_final_message": None, "add_generation_prompt": False}),
        (begun(prefix=False), {"add_generation_prompt": False}),
    ):
        await posted(http, path, body(path, marked, **fields))
    assert len({request.prompt_ids for request in submitted}) == 1
    await posted(http, path, body(path, begun(prefix=False), continue_final_message=False))
    assert len({request.prompt_ids for request in submitted}) == 2


async def test_an_unmarked_turn_of_the_assistant_is_followed_by_another(
    http: httpx2.AsyncClient, tokenizer: Tokenizer
) -> None:
    found = await posted(http, TOKENIZE, {"messages": begun()})
    text = (
        f"<|im_start|>user\nHello{END}\n<|im_start|>assistant\nOnce{END}\n<|im_start|>assistant\n"
    )
    assert found["tokens"] == ids_of(tokenizer, text)


async def test_stop_strings_are_looked_for_in_what_is_new(
    http: httpx2.AsyncClient, engine: Engine, tokenizer: Tokenizer
) -> None:
    engine.script[:] = ids_of(tokenizer, "b, then ab")
    found = await posted(http, CHAT, body(CHAT, begun("a"), stop=["ab"], max_tokens=100))
    assert said(CHAT, found) == ("", "b, then ")


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


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_thoughts_that_are_begun_are_gone_on_with(
    http: httpx2.AsyncClient, engine: Engine, tokenizer: Tokenizer, path: str
) -> None:
    engine.script[:] = ids_of(tokenizer, f" so</think>\n\nDone{END}")
    ways: dict[str, list[dict[str, Any]]] = {
        CHAT: begun("", reasoning_content="Hm,"),
        MESSAGES: begun([{"type": "thinking", "thinking": "Hm,", "signature": ""}]),
        RESPONSES: [*ASKED, {"type": "reasoning", "summary": [{"text": "Hm,"}]}],
    }
    turns = ways[path]
    length = {"max_output_tokens" if path == RESPONSES else "max_tokens": 100}
    assert said(path, await posted(http, path, body(path, turns, **length))) == (" so", "Done")


async def test_a_budget_counts_the_thoughts_that_are_new(
    http: httpx2.AsyncClient, engine: Engine, tokenizer: Tokenizer
) -> None:
    engine.script[:] = ids_of(tokenizer, "abcdef")
    turns = begun("", reasoning_content="Hm, hm, hm")
    found = await posted(http, CHAT, body(CHAT, turns, max_tokens=5, thinking_token_budget=2))
    assert said(CHAT, found)[0] == "ab"


async def test_text_after_thoughts_is_text(
    http: httpx2.AsyncClient, engine: Engine, tokenizer: Tokenizer
) -> None:
    engine.script[:] = ids_of(tokenizer, f" <think> </think>{END}")
    turns = begun("A tag is", reasoning_content="Hm.")
    found = await posted(http, CHAT, body(CHAT, turns, max_tokens=100))
    assert said(CHAT, found) == ("", " <think> </think>")


# --- forms and calls --------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("fields", [{}, {"tools": True}])
async def test_an_answer_of_a_form_is_continued_within_it(
    http: httpx2.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    if fields:
        own = {
            CHAT: TOOLS,
            RESPONSES: [{"type": "function", "name": "look"}],
            MESSAGES: [{"name": "look", "input_schema": {"type": "object"}}],
        }
        fields = {"tools": own[path]}
    start = '{"a": '
    asked = body(path, begun(start), **SCHEMA_FORM, **fields) | {"n": 1}
    asked |= {"max_output_tokens" if path == RESPONSES else "max_tokens": 40}
    _, text = said(path, await posted(http, path, asked))
    assert not text.startswith("{")
    assert isinstance(json.loads(start + text)["a"], int)


async def test_all_choices_go_on_with_a_form(http: httpx2.AsyncClient) -> None:
    asked = body(CHAT, begun('{"a": 5'), **SCHEMA_FORM, n=3, max_tokens=40)
    found = await posted(http, CHAT, asked | {"temperature": 1.0})
    for choice in found["choices"]:
        assert str(json.loads('{"a": 5' + choice["message"]["content"])["a"]).startswith("5")


async def test_a_form_holds_after_thoughts_that_are_begun(
    http: httpx2.AsyncClient, engine: Engine, tokenizer: Tokenizer
) -> None:
    engine.script[:] = ids_of(tokenizer, "so</think>")
    turns = begun("", reasoning_content="Hm, ")
    found = await posted(http, CHAT, body(CHAT, turns, **SCHEMA_FORM, max_tokens=60))
    thoughts, text = said(CHAT, found)
    assert thoughts == "so"
    assert list(json.loads(text)) == ["a"]


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


async def test_a_call_follows_the_text_that_is_begun(
    http: httpx2.AsyncClient, engine: Engine, tokenizer: Tokenizer
) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    engine.script[:] = ids_of(tokenizer, f" see.\n{call}{END}")
    asked = body(CHAT, begun("Let me"), tools=TOOLS, max_tokens=100)
    (choice,) = (await posted(http, CHAT, asked))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" see.", "tool_calls")
    assert len(choice["message"]["tool_calls"]) == 1


# --- what cannot be continued -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "turns", "fields", "param"),
    [
        (CHAT, ASKED, {}, "continue_final_message"),
        (RESPONSES, ASKED, {}, "continue_final_message"),
        (TOKENIZE, ASKED, {}, "continue_final_message"),
        (CHAT, begun(), {"add_generation_prompt": True}, "add_generation_prompt"),
        (RESPONSES, begun(), {"add_generation_prompt": True}, "add_generation_prompt"),
        (TOKENIZE, begun(), {"add_generation_prompt": True}, "add_generation_prompt"),
        (
            CHAT,
            ASKED,
            {"continue_final_message": None, "add_generation_prompt": False},
            "add_generation_prompt",
        ),
        (CHAT, [*begun(prefix=True), *ASKED], {}, "messages[1].prefix"),
        (CHAT, [{"role": "user", "content": "Hi", "prefix": True}], {}, "messages[0].prefix"),
        (RESPONSES, [*begun(prefix=True), *ASKED], {}, "input[1].prefix"),
        (RESPONSES, [{"role": "user", "content": "Hi", "prefix": True}], {}, "input[0].prefix"),
        (CHAT, begun()[1:], {}, "messages"),
        (MESSAGES, begun()[1:], {}, None),
        (CHAT, begun(tool_calls=[{"function": {"name": "look"}}]), {}, "messages"),
        (TOKENIZE, begun(tool_calls=[{"function": {"name": "look"}}]), {}, "messages"),
        (MESSAGES, begun([{"type": "tool_use", "id": "a", "name": "look"}]), {}, None),
        (
            RESPONSES,
            [*ASKED, {"type": "function_call", "call_id": "a", "name": "look"}],
            {},
            "input",
        ),
        (CHAT, begun(), {"tools": TOOLS, "tool_choice": "required"}, "messages"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    http: httpx2.AsyncClient, path: str, turns: list[Any], fields: dict[str, Any], param: str | None
) -> None:
    asked = {"messages": turns} | CONTINUED | fields if path == TOKENIZE else None
    found, _ = await refused(http, path, asked or body(path, turns, **fields))
    assert found == param


async def test_a_text_has_no_message_to_be_continued(http: httpx2.AsyncClient) -> None:
    asked = {"prompt": "a"} | CONTINUED
    assert (await refused(http, TOKENIZE, asked))[0] == "continue_final_message"
