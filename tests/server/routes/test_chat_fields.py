"""What single fields of a chat do to its answer."""

from typing import Any

import httpx2
import pytest

from engine.client import EngineClient
from engine.types import Submission
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, END, Engine, chat, ids_of, posted, token_id


async def answer(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    return await posted(http, CHAT, chat(**fields))


def text_of(found: dict[str, Any]) -> str:
    (choice,) = found["choices"]
    text: str = choice["message"]["content"]
    return text


async def test_the_models_end_may_be_ignored(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"a{END}b{END}c")
    found = await answer(http, ignore_eos=True, max_tokens=5)
    assert text_of(found) == "abc"
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 5


async def test_other_tokens_may_end_an_answer_and_are_no_part_of_it(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "abcd")
    found = await answer(http, stop_token_ids=[token_id(tokenizer, "c")])
    assert (text_of(found), found["choices"][0]["finish_reason"]) == ("ab", "stop")


async def test_an_answer_has_at_least_the_tokens_that_were_asked_for(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"a{END}{END}{END}b{END}")
    assert (await answer(http))["usage"]["completion_tokens"] == 2
    found = await answer(http, min_tokens=4)
    assert found["usage"]["completion_tokens"] == 6
    assert text_of(found).endswith("b")


async def test_priorities_reach_the_engine(
    http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    submit = EngineClient.submit_choices

    def spy(self: EngineClient, asked: Submission, *args: Any) -> Any:
        seen.append(asked.priority)
        return submit(self, asked, *args)

    monkeypatch.setattr(EngineClient, "submit_choices", spy)
    await answer(http, max_tokens=1)
    await answer(http, max_tokens=1, priority=-7)
    assert seen == [0, -7]


async def test_thoughts_end_with_their_budget(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, f"<think>abcdefgh</think>Yes.{END}")
    free = (await answer(http))["choices"][0]["message"]
    assert (free["reasoning"], free["content"]) == ("abcdefgh", "Yes.")
    for field in ("thinking_token_budget", "thinking_budget"):
        held = (await answer(http, **{field: 3}, max_tokens=6))["choices"][0]["message"]
        assert held["reasoning"] == "abc"


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"structured_outputs": {"regex": "x{3}"}}, ("xxx",)),
        ({"guided_grammar": 'start: "a" "b"'}, ("ab",)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"const": 7}},
                }
            },
            ("7",),
        ),
    ],
)
async def test_the_answer_has_the_form_that_was_asked_for(
    http: httpx2.AsyncClient, fields: dict[str, Any], texts: tuple[str, ...]
) -> None:
    found = await answer(http, **fields, temperature=1, seed=3, reasoning_effort="none")
    assert text_of(found) in texts
    assert found["choices"][0]["finish_reason"] == "stop"


async def test_a_form_that_cannot_be_enforced_is_a_400(http: httpx2.AsyncClient) -> None:
    schema = {"type": "object", "not": {"a": 1}}
    named = {"name": "n", "strict": True, "schema": schema}
    form = {"type": "json_schema", "json_schema": named}
    response = await http.post(CHAT, json=chat(response_format=form))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format.json_schema.schema")
    assert "not" in error["message"]


async def test_a_system_message_may_come_at_any_time(http: httpx2.AsyncClient) -> None:
    messages = [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": [{"type": "text", "text": "Two."}]},
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": "Three."},
        {"role": "user", "content": "Go on.", "name": "me"},
    ]
    response = await http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert response.status_code == 200
