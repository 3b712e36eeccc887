"""Thoughts that clients leave out, at the doors of the APIs: their answers' turns get them back."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.text.tokenizer import Tokenizer
from tests.api.table import CHAT as API
from tests.engines import VOCAB
from tests.models import TEMPLATE, write_tokenizer
from tests.server.harness import (
    CHAT,
    END,
    Engine,
    Json,
    chat,
    engine_fixture,
    ids_of,
    posted,
    told,
)

CALL = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
WAIT = {"type": "function", "function": {"name": "wait"}}
THOUGHTS = ("reasoning", "reasoning_content")


engine = engine_fixture(max_model_len=900, prefix_keep_s=1000.0)


@pytest.fixture
def says(engine: Engine, tokenizer: Tokenizer) -> Any:
    """Has the model think, and say something."""

    def say(said: str = CALL, thought: str = "Hm.") -> None:
        engine.script[:] = ids_of(tokenizer, f"<think>\n{thought}\n</think>\n\n{said}{END}")

    return say


async def post(http: httpx2.AsyncClient, path: str, body: Json, key: str = "") -> Json:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await posted(http, path, body, headers=headers)


async def prompt_ids(http: httpx2.AsyncClient, body: Json, key: str = "") -> list[int]:
    """What a chat's prompt would be."""
    ids: list[int] = (await post(http, "/tokenize", body, key))["tokens"]
    return ids


def forgetful(message: Json) -> Json:
    """As a client sends it back that knows nothing of thoughts."""
    return {name: value for name, value in message.items() if name not in THOUGHTS}


def next_turn(body: Json, message: Json) -> tuple[Json, Json]:
    """What follows an answer, by a client that sends its thoughts back and by one that does not."""
    call = message.get("tool_calls", [{}])[0].get("id")
    heard = {"role": "tool", "tool_call_id": call, "content": "Done."}
    asked = heard if call else {"role": "user", "content": "And?"}
    full = body | {"messages": [*body["messages"], message, asked]}
    return full, body | {"messages": [*body["messages"], forgetful(message), asked]}


async def answered(
    http: httpx2.AsyncClient, body: Json, key: str = "", **fields: Any
) -> tuple[Json, Json]:
    """See ``next_turn``; after the answer to a chat."""
    choice = (await post(http, CHAT, body | fields, key))["choices"][0]
    assert choice["message"]["reasoning"]
    return next_turn(body, choice["message"])


async def test_a_loop_of_tools_has_the_same_prompt_whether_thoughts_come_back_or_not(
    says: Any, http: httpx2.AsyncClient
) -> None:
    body = chat(tools=[WAIT])
    for thought in ("First.", "Second."):
        says(thought=thought)
        first = await post(http, CHAT, body)
        full, without = next_turn(body, first["choices"][0]["message"])
        assert await prompt_ids(http, without) == await prompt_ids(http, full)
        body = without
    says("Yes.")
    second = await post(http, CHAT, body)
    so_far = first["usage"]["total_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= so_far - 16


@pytest.mark.parametrize("said", ["Yes.", f"Sure.\n{CALL}"])
async def test_a_streamed_answer_is_remembered_like_a_whole_one(
    says: Any, http: httpx2.AsyncClient, said: str
) -> None:
    body = chat(tools=[WAIT])
    says(said)
    answer = API.read_stream((await http.post(CHAT, json=API.with_stream(body))).text)
    message: Json = {"role": "assistant", "content": answer.text, "reasoning": answer.thoughts}
    if answer.calls:
        made = {"name": "wait", "arguments": "{}"}
        message["tool_calls"] = [{"id": answer.ids[-1], "function": made}]
    full, without = next_turn(body, message)
    assert message["reasoning"] == "Hm."
    assert await prompt_ids(http, without) == await prompt_ids(http, full)


async def test_each_of_several_answers_has_its_own_thoughts(engine: Engine, tmp_path: Path) -> None:
    """They think as long as they may, each in its own words."""
    write_tokenizer(tmp_path, VOCAB, template=TEMPLATE + "<think>\n")
    async with told(engine, Tokenizer(tmp_path)) as http:
        body = chat(n=2, temperature=1.5, seed=3, max_tokens=40)
        form = {"guided_regex": "[a-z]{8}", "thinking_token_budget": 5}
        choices = (await post(http, CHAT, body | form))["choices"]
        messages = [choice["message"] for choice in choices]
        assert len({message["reasoning"] for message in messages}) == 2
        assert len({message["content"] for message in messages}) == 2
        for message in messages:
            full, without = next_turn(chat(), message)
            assert await prompt_ids(http, without) == await prompt_ids(http, full)


@pytest.mark.parametrize("said", ["Yes.", CALL])
async def test_another_key_or_salt_gets_no_thoughts(
    says: Any, http: httpx2.AsyncClient, said: str
) -> None:
    says(said)
    full, without = await answered(http, chat(tools=[WAIT]), "one", cache_salt="me")
    wanted = await prompt_ids(http, full, "one")
    for key, salt in (("one", "me"), ("two", "me"), ("", "me"), ("one", "you"), ("one", None)):
        ids = await prompt_ids(http, without | {"cache_salt": salt}, key)
        assert (ids == wanted) == ((key, salt) == ("one", "me")), (key, salt)
        assert len(ids) <= len(wanted)


async def test_the_same_words_in_another_conversation_get_no_thoughts(
    says: Any, http: httpx2.AsyncClient
) -> None:
    says("Yes.")
    full, without = await answered(http, chat("Is it blue?"))
    assert await prompt_ids(http, without) == await prompt_ids(http, full)
    other = json.loads(json.dumps(without).replace("blue", "pink"))
    kept = json.loads(json.dumps(full).replace("blue", "pink"))
    assert len(await prompt_ids(http, other)) < len(await prompt_ids(http, kept))


async def test_what_a_client_says_was_thought_is_what_was_thought(
    says: Any, http: httpx2.AsyncClient
) -> None:
    says()
    full, without = await answered(http, chat(tools=[WAIT]))
    full["messages"][1] |= {"reasoning": "Else.", "reasoning_content": "Else."}
    assert await prompt_ids(http, full) != await prompt_ids(http, without)


async def test_a_call_without_an_id_gets_no_thoughts(says: Any, http: httpx2.AsyncClient) -> None:
    says()
    full, without = await answered(http, chat(tools=[WAIT]))
    del without["messages"][1]["tool_calls"][0]["id"]
    assert len(await prompt_ids(http, without)) < len(await prompt_ids(http, full))


@pytest.mark.parametrize(("max_bytes", "remembered"), [(0, 0), (250, 1), (450, 2), (10_000, 3)])
async def test_no_more_is_remembered_than_the_setting_says(
    engine: Engine, tokenizer: Tokenizer, says: Any, max_bytes: int, remembered: int
) -> None:
    async with told(engine, tokenizer, max_thought_bytes=max_bytes) as http:
        turns = []
        for question in "abc":
            says("Yes.", question * 168)
            turns.append(await answered(http, chat(question)))
        same = [
            await prompt_ids(http, without) == await prompt_ids(http, full)
            for full, without in turns
        ]
    assert same == [False] * (3 - remembered) + [True] * remembered


async def test_a_template_that_keeps_no_thoughts_has_the_prompts_that_it_had(
    engine: Engine, tmp_path: Path
) -> None:
    plain = TEMPLATE.replace("message.reasoning_content", "false and message.reasoning_content")
    write_tokenizer(tmp_path, VOCAB, template=plain)
    tokenizer = Tokenizer(tmp_path)
    async with told(engine, tokenizer) as http:
        engine.script[:] = ids_of(tokenizer, f"<think>\nHm.\n</think>\n\n{CALL}{END}")
        _, without = await answered(http, chat(tools=[WAIT]), "one")
        ids = await prompt_ids(http, without, "one")
        assert ids == await prompt_ids(http, without, "two")


# --- the other APIs ----------------------------------------------------------------------------


async def test_anthropics_clients_may_leave_thinking_blocks_out(
    says: Any, http: httpx2.AsyncClient
) -> None:
    asked: list[Json] = [{"role": "user", "content": "Hello"}]
    body = {"messages": asked, "tools": [{"name": "wait", "input_schema": {"type": "object"}}]}
    says()
    limit = {"max_tokens": 100, "temperature": 0, "cache_salt": "me"}
    blocks = (await post(http, "/v1/messages", body | limit))["content"]
    assert [block["type"] for block in blocks] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": "Done."}
    counts = []
    for sent, salt in ((blocks, "me"), (blocks[1:], "me"), (blocks[1:], "you")):
        talk = [
            *asked,
            {"role": "assistant", "content": sent},
            {"role": "user", "content": [result]},
        ]
        told = body | {"messages": talk, "cache_salt": salt}
        found = await post(http, "/v1/messages/count_tokens", told)
        counts.append(found["input_tokens"])
    assert counts[0] == counts[1] > counts[2]


async def test_responses_may_leave_reasoning_items_out(says: Any, http: httpx2.AsyncClient) -> None:
    asked: list[Json] = [{"role": "user", "content": "Hello"}]
    body = {"input": asked, "tools": [{"type": "function", "name": "wait"}], "temperature": 0}
    says()
    items = (await post(http, "/v1/responses", body))["output"]
    assert [item["type"] for item in items] == ["reasoning", "function_call"]
    heard = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "Done."}
    counts = []
    for sent, key in ((items, ""), (items[1:], ""), (items[1:], "other")):
        told = body | {"input": [*asked, *sent, heard]}
        found = await post(http, "/v1/responses/input_tokens", told, key)
        counts.append(found["input_tokens"])
    assert counts[0] == counts[1] > counts[2]
