"""Forms of answers at the door: what holds up nobody else, and what is the client's own fault."""

import asyncio
import json
import statistics
import time
from collections import Counter
from typing import Any

import httpx2
import pytest

from server.text.grammar.constraints import GrammarConstraint
from server.text.grammar.worker import GrammarLimits
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, Engine, chat, told

JSON_OBJECT: dict[str, Any] = {"response_format": {"type": "json_object"}}
# Seconds of processor time, and half a GiB.
BOMB = "(ab|cd)*" * 12000
# Its first tokens are easy; it has too many states for the rest.
TIRING = "(([a-z]{1,99}){1,99}){1,99}"


def schema_form(schema: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
    form = {"name": "n", "strict": strict, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


PATTERN = {"type": "string", "maxLength": 2, "pattern": "^(?!x)a/é(b"}
PART = {"type": "object", "properties": {"a,b": PATTERN}, "required": ["a,b"]}
LEFT = "pattern at #/properties/a%2Cb"
FORM = {"type": "json_schema", "name": "n", "schema": PART}
TOOL = {"name": "f", "parameters": PART}
CALL: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]}
SAY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
OF_MESSAGES = {
    "tools": [{"name": "f", "input_schema": PART}],
    "tool_choice": {"type": "any"},
}
HIDDEN = "X-Quire-Not-Enforced"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "left"),
    [
        (CHAT, SAY | schema_form(PART, strict=False), LEFT),
        (CHAT, SAY | {"response_format": {"type": "json_object", "schema": PART}}, LEFT),
        (CHAT, SAY | CALL | {"tool_choice": "required"}, LEFT.replace("#", "f#")),
        ("/v1/messages", SAY | OF_MESSAGES, LEFT.replace("#", "f#")),
        ("/v1/responses", {"input": "Hi", "text": {"format": FORM}}, LEFT),
        ("/api/chat", SAY | {"format": PART}, LEFT),
        ("/api/generate", {"prompt": "Hi", "format": PART}, LEFT),
        (CHAT, SAY | schema_form({"type": "null"}, strict=False), None),
        (CHAT, SAY | CALL, None),
    ],
)
async def test_a_header_lists_what_is_left_to_the_model(
    http: httpx2.AsyncClient, path: str, fields: dict[str, Any], left: str | None, stream: bool
) -> None:
    response = await http.post(path, json=fields | {"stream": stream})
    assert response.status_code == 200, response.text
    assert response.headers.get(HIDDEN) == left


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (CHAT, SAY | schema_form(PART), f"{LEFT} cannot be used: look-around"),
        (CHAT, SAY | {"guided_json": PART}, f"{LEFT} cannot be used: look-around"),
        (CHAT, SAY | {"structured_outputs": {"json": PART}}, f"{LEFT} cannot be used"),
        (
            CHAT,
            SAY | {"tools": [{"type": "function", "function": TOOL | {"strict": True}}]},
            f"{LEFT.replace('#', 'f#')} cannot be used: look-around",
        ),
        ("/v1/responses", {"input": "Hi", "text": {"format": FORM | {"strict": True}}}, LEFT),
        ("/v1/messages", SAY | {"output_config": {"format": FORM}}, f"{LEFT} cannot be used"),
        (CHAT, SAY | {"guided_regex": "(a"}, "pattern cannot be used: unclosed group, at chara"),
    ],
)
async def test_a_strict_form_is_refused_with_keyword_place_and_reason(
    http: httpx2.AsyncClient, path: str, fields: dict[str, Any], says: str
) -> None:
    response = await http.post(path, json=fields)
    assert response.status_code == 400
    assert f"This form cannot be enforced: {says}" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_regex": "z|" + BOMB}, "cannot be enforced"),
        ({"guided_regex": "a{60000}"}, "a repeat of more than 8192"),
        ({"guided_regex": "(a?){500}a{500}"}, "it is too large"),
        (schema_form({"properties": {f"p{n}": {} for n in range(500)}}), "too many ways"),
        (
            schema_form(
                {"properties": {f"p{n}": {} for n in range(1000)}, "additionalProperties": False}
            ),
            "too many ways",
        ),
        ({"guided_grammar": "[" * 40_000}, "cannot be enforced"),
        ({"guided_grammar": '"' + '\\"' * 40_000}, "cannot be enforced"),
        ({"guided_grammar": 'root ::= "a"' + "\n" * 50_000}, None),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_form_that_cannot_be_followed_is_a_400_while_others_start_at_once(
    engine: Engine, tokenizer: Tokenizer, fields: dict[str, Any], says: str | None
) -> None:
    async with told(engine, tokenizer, max_grammar_compile_s=0.3) as http:
        plain = chat(**JSON_OBJECT, max_tokens=3)
        assert (await http.post(CHAT, json=plain)).status_code == 200
        hostile = asyncio.create_task(http.post(CHAT, json=chat(**fields, max_tokens=3)))
        answered = 0
        while not hostile.done():
            assert (await http.post(CHAT, json=plain)).status_code == 200
            answered += 1
        response = await hostile
        assert answered
        assert response.status_code == (200 if says is None else 400)
        if says is not None:
            assert says in response.json()["error"]["message"]


async def test_forms_that_wait_too_long_for_their_turn_are_told_to_come_back(
    engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.text.grammar.worker.SLOW_WAITING", 1)
    # Time is what ends them: a fast processor would reach the memory's limit before.
    limits = GrammarLimits(0.2, max_memory_bytes=2**30)
    monkeypatch.setattr(GrammarLimits, "of", lambda _: limits)
    async with told(engine, tokenizer) as http:
        bombs = [chat(guided_regex=f"z{n}|{BOMB}", max_tokens=3) for n in range(4)]
        found = await asyncio.gather(*(http.post(CHAT, json=bomb) for bomb in bombs))
        assert {response.status_code for response in found} == {400, 429}
        busy = next(response for response in found if response.status_code == 429)
        assert busy.json()["error"]["code"] == "grammars_full"
        assert busy.headers["Retry-After"] == "1"


async def test_costly_masks_of_many_answers_are_not_all_made_in_the_same_step(
    engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, clock, made = GrammarConstraint.fill_mask, time.thread_time, Counter[int]()

    def costly(self: GrammarConstraint, row: Any) -> bool:
        """Takes 0.4 s; all masks of a step of this engine may take 1 s."""
        made[engine.gate.entered] += 1
        return fill(self, row)

    monkeypatch.setattr(time, "thread_time", lambda: clock() + 0.4 * made.total())

    async with told(engine, tokenizer) as http:
        forms = [chat(guided_regex=f"[a-z]{{{n}}}", max_tokens=12) for n in range(20, 28)]
        monkeypatch.setattr(GrammarConstraint, "fill_mask", costly)
        found = await asyncio.gather(*(http.post(CHAT, json=form) for form in forms))
    assert {response.status_code for response in found} == {200}
    # What one costs is known once it has been made.
    assert statistics.median(made.values()) < len(forms) / 2, made


async def test_a_form_that_comes_to_its_limits_in_the_answer_is_the_clients_fault(
    engine: Engine, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with told(engine, tokenizer) as http:
        asked = chat(guided_regex=TIRING, max_tokens=300)
        for _ in range(2):  # what is known of it from the first answer does not count
            response = await http.post(CHAT, json=asked, headers={"X-Request-Id": "tiring"})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "form_limits")
            assert "has come to its limits: it is too large" in error["message"]
        streamed = await http.post(CHAT, json=asked | {"stream": True})
        assert streamed.text.rstrip().endswith("}}")
        assert json.loads(streamed.text.rstrip().rpartition("data: ")[2])["error"]["code"] == (
            "form_limits"
        )
    assert "the request tiring has failed: the answer's form has come to its limits" in caplog.text
