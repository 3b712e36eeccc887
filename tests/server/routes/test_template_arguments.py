"""chat_template_kwargs, at the door of every API that takes a conversation."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.types import Request
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer
from tests.server.harness import CHAT, Engine, serving

MESSAGES, RESPONSES, TOKENIZE = "/v1/messages", "/v1/responses", "/tokenize"
COUNTS = ("/v1/messages/count_tokens", "/v1/responses/input_tokens", TOKENIZE)
TEMPLATE = (
    "{{ '[' ~ preserve_thinking ~ '|' ~ reasoning_effort ~ ']' }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ chat_template }}{{ eos_token }}"
)
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    MESSAGES: {"messages": HELLO, "max_tokens": 1},
    RESPONSES: {"input": HELLO, "max_output_tokens": 1},
    COUNTS[0]: {"messages": HELLO},
    COUNTS[1]: {"input": HELLO},
    TOKENIZE: {"messages": HELLO},
}


@pytest.fixture
def telling(tmp_path: Path) -> Tokenizer:
    """Its template writes what it was told."""
    write_tokenizer(tmp_path, VOCAB, template=TEMPLATE)
    return Tokenizer(tmp_path)


@pytest.fixture
async def http(engine: Engine, telling: Tokenizer) -> AsyncIterator[httpx2.AsyncClient]:
    async with serving(engine.client, telling) as (_, client):
        yield client


@pytest.mark.parametrize("path", [path for path in BODIES if path not in COUNTS])
async def test_what_the_template_takes_is_passed_on(
    http: httpx2.AsyncClient, telling: Tokenizer, submitted: list[Request], path: str
) -> None:
    given = {"preserve_thinking": True, "reasoning_effort": "zebra", "enable_thinking": None}
    response = await http.post(path, json=BODIES[path] | {"chat_template_kwargs": given})
    assert response.status_code == 200, response.text
    text = telling.fast.decode(list(submitted[0].prompt_ids), skip_special_tokens=False)
    assert text == "[True|zebra]Hello<|im_end|>"


@pytest.mark.parametrize("path", COUNTS)
async def test_what_it_makes_of_them_is_counted(http: httpx2.AsyncClient, path: str) -> None:
    counts = []
    for effort in ("", "zebra"):
        given = {"reasoning_effort": effort}
        response = await http.post(path, json=BODIES[path] | {"chat_template_kwargs": given})
        found = response.json()
        counts.append(found.get("count", found.get("input_tokens")))
    assert counts[1] == counts[0] + len("zebra")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "name", ["thinking_budget", "chat_template", "eos_token", "a b", "X" * 300]
)
async def test_what_it_does_not_take_is_refused_with_what_it_takes(
    http: httpx2.AsyncClient, path: str, name: str
) -> None:
    response = await http.post(path, json=BODIES[path] | {"chat_template_kwargs": {name: 1}})
    assert response.status_code == 400
    said = response.json()["error"]["message"]
    assert name[:200] in said
    assert "preserve_thinking, reasoning_effort." in said
    assert len(said) < 1000


async def test_what_says_nothing_is_as_if_it_were_not_there(
    http: httpx2.AsyncClient, telling: Tokenizer, submitted: list[Request]
) -> None:
    given = {"preserve_thinking": None, "thinking_budget": None}
    response = await http.post(CHAT, json=BODIES[CHAT] | {"chat_template_kwargs": given})
    assert response.status_code == 200
    text = telling.fast.decode(list(submitted[0].prompt_ids), skip_special_tokens=False)
    assert text.startswith("[|]")


async def test_a_template_that_takes_nothing_says_so(engine: Engine, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    async with serving(engine.client, Tokenizer(tmp_path)) as (_, http):
        asked = BODIES[CHAT] | {"chat_template_kwargs": {"preserve_thinking": True}}
        response = await http.post(CHAT, json=asked)
    assert response.json()["error"]["message"].endswith("What it takes: none.")


EFFORTS: dict[str, Any] = {
    CHAT: lambda effort: {"reasoning_effort": effort},
    MESSAGES: lambda effort: {"output_config": {"effort": effort}},
    RESPONSES: lambda effort: {"reasoning": {"effort": effort}},
}


@pytest.mark.parametrize("path", EFFORTS)
@pytest.mark.parametrize(
    ("spells", "effort", "told"),
    [
        ("", "low", "low"),
        ("", "xhigh", "xhigh"),
        ("'low' 'medium' 'high'", "minimal", "low"),
        ("'low' 'medium' 'high'", "max", "high"),
        ('"minimal" "xhigh"', "low", "minimal"),
        ("'high'", "medium", "medium"),
    ],
)
async def test_a_template_that_takes_an_effort_is_told_it_and_no_budget_holds(
    engine: Engine,
    tmp_path: Path,
    submitted: list[Request],
    path: str,
    spells: str,
    effort: str,
    told: str,
) -> None:
    write_tokenizer(tmp_path, VOCAB, template=f"{TEMPLATE}{{# {spells} <think> #}}")
    tokenizer = Tokenizer(tmp_path)
    body = BODIES[path] | EFFORTS[path](effort)
    async with serving(engine.client, tokenizer) as (_, http):
        for fields, heard in (
            ({}, told),
            ({"chat_template_kwargs": {"reasoning_effort": "zebra"}}, "zebra"),
        ):
            response = await http.post(path, json=body | fields)
            assert response.status_code == 200, response.text
            text = tokenizer.fast.decode(list(submitted[-1].prompt_ids))
            assert f"|{heard}]" in text
        assert submitted[0].constraint is None
        if path == CHAT:
            await http.post(path, json=body | {"thinking_budget": 5})
            assert submitted[-1].constraint is not None
