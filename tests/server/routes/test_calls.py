"""Tools of several models, and talks with calls; tests/api has what is read of calls."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.text.tokenizer import Tokenizer
from tests.api.table import CHAT as API
from tests.api.wire import Answer
from tests.engines import VOCAB
from tests.models import SPECIAL_TOKENS, TEMPLATE, XML_TEMPLATE, write_tokenizer
from tests.server.harness import (
    CHAT,
    END,
    Engine,
    Json,
    chat,
    engine_fixture,
    ids_of,
    posted,
    serving,
    token_id,
)
from tests.templates import HYBRID_TEMPLATE

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["a", "b"]}, "times": {"type": "integer"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
WAIT = {"type": "function", "function": {"name": "wait"}}


def hermes(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def xml(name: str, **arguments: Any) -> str:
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


# With room for tools in its prompts, none of which a pause between two requests forgets.
engine = engine_fixture(max_model_len=900, prefix_keep_s=1000.0)


async def answer(http: httpx2.AsyncClient, **fields: Any) -> Answer:
    """A whole answer, which is the same when it is streamed."""
    whole = API.read_whole(await posted(http, CHAT, chat(**fields)))
    response = await http.post(CHAT, json=API.with_stream(chat(**fields)))
    streamed = API.read_stream(response.text)
    streamed.ids = whole.ids
    assert streamed == whole
    return whole


async def both_turns(
    http: httpx2.AsyncClient, engine: Engine, tokenizer: Tokenizer, *says: str, **changes: Any
) -> tuple[Json, Json]:
    """An answer with a call, and the one to what came of it. changes: of the call, on its way."""
    body = chat(tools=[LOOK, WAIT])
    engine.script[:] = ids_of(tokenizer, says[0] + END)
    first = await posted(http, CHAT, body)
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    call["id"] = changes.get("id", call["id"])
    call["function"]["arguments"] = changes.get("arguments", call["function"]["arguments"])
    body["messages"] += [message, {"role": "tool", "tool_call_id": call["id"], "content": "b"}]
    engine.script[:] = ids_of(tokenizer, says[1] + END)
    return first, await posted(http, CHAT, body)


def goes_on(first: Json, second: Json) -> bool:
    """Whether all of a prompt and its answer is the beginning of the next prompt."""
    so_far: int = first["usage"]["total_tokens"]
    cached: int = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    return so_far - 16 <= cached <= so_far


# --- calls that are asked for ------------------------------------------------------------------


async def test_every_choice_has_calls_of_its_own(http: httpx2.AsyncClient) -> None:
    wanted: Any = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
    body = chat(**wanted, n=3, reasoning_effort="none")
    choices = (await posted(http, CHAT, body))["choices"]
    calls = [call for choice in choices for call in choice["message"]["tool_calls"]]
    assert [call["function"]["name"] for call in calls] == ["look"] * 3
    assert len({call["id"] for call in calls}) == 3


# --- conversations with calls ------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"id": "call_x"}])
async def test_a_call_that_comes_back_in_other_words_is_the_one_that_the_model_wrote(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, changes: dict[str, str]
) -> None:
    wrote = '<tool_call>{"name":"look","arguments":{"times":3,"at":"a"}}</tool_call>'
    says = f"<think>\nHm.\n</think>\n\n{wrote}", "Yes."
    other = {"arguments": '{ "at": "\\u0061", "times": 3.0 }'} | changes
    first, second = await both_turns(http, engine, tokenizer, *says, **other)
    assert goes_on(first, second) is ("id" not in changes)


# --- other models ------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [False, True], ids=["plain tags", "special tags"])
@pytest.mark.parametrize(
    ("template", "write"), [(TEMPLATE, hermes), (XML_TEMPLATE, xml)], ids=["hermes", "xml"]
)
async def test_both_formats_are_read_and_enforced_whatever_kind_of_token_tags_are(
    engine: Engine, tmp_path: Path, template: str, write: Any, special: bool
) -> None:
    kinds = {"special": (*SPECIAL_TOKENS, *TAGS), "plain": ()} if special else {}
    write_tokenizer(tmp_path, VOCAB, template=template, **kinds)
    tokenizer = Tokenizer(tmp_path)
    end = frozenset({token_id(tokenizer, END)})
    call = write("look", at="a", times=3)
    async with serving(engine.client, tokenizer, stop_token_ids=end) as (_, http):
        engine.script[:] = ids_of(tokenizer, f"<think>Hm.</think>Sure.\n{call}{END}")
        made = await answer(http, tools=[LOOK])
        assert (made.thoughts, made.text) == ("Hm.", "Sure.")
        assert made.calls == [("look", {"at": "a", "times": 3})]
        engine.script.clear()
        wanted = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
        made = await answer(http, **wanted, temperature=1, seed=5, reasoning_effort="none")
        assert made.calls[0][0] == "look"


async def test_a_model_whose_prompt_opens_its_thoughts_thinks_calls_and_goes_on(
    engine: Engine, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, VOCAB, template=HYBRID_TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    end = frozenset({token_id(tokenizer, END)})
    async with serving(engine.client, tokenizer, stop_token_ids=end) as (_, http):
        says = f"Hm.\n</think>\n\nSure.\n\n{xml('look', at='a', times=3)}"
        engine.script[:] = ids_of(tokenizer, says + END)
        made = await answer(http, tools=[LOOK, WAIT])
        assert made.thoughts == "Hm."
        assert made.text == "Sure.\n", "the template takes off what is left"
        assert made.calls == [("look", {"at": "a", "times": 3})]
        more = "Well.\n</think>\n\nSo be it."
        first, second = await both_turns(http, engine, tokenizer, says, more)
        made = API.read_whole(second)
        assert (made.thoughts, made.text) == ("Well.", "So be it.")
        assert goes_on(first, second)
