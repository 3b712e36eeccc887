"""The model that the clients' servers serve says what it is told."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from server.config import Config
from server.text.tokenizer import Tokenizer
from tests.clients.models import tokenizer_only
from tests.clients.parrot import NOTHING_TO_REPEAT, Parrot, told_answer, told_engine, told_service
from tests.engines import VOCAB
from tests.server.harness import CHAT, chat, http_client, running


@pytest.fixture
async def parrot(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    tokenizer = Tokenizer(tokenizer_only(tmp_path, VOCAB))
    client = told_engine(Parrot(tokenizer), check_every_step=True)
    async with running(told_service(client, tokenizer, Config())) as app, http_client(app) as http:
        yield http
    assert client.stop(10)


async def said(http: httpx2.AsyncClient, text: str, **fields: object) -> str:
    response = await http.post(CHAT, json=chat(text, temperature=1.5, **fields))
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    content: str = choice["message"]["content"]
    return content


async def test_it_repeats_what_it_is_told_at_any_temperature_and_to_many_at_once(
    parrot: httpx2.AsyncClient,
) -> None:
    wanted = [f"{'ä' * length} und {length} 🙂" for length in range(1, 13)]
    answers = await asyncio.gather(*(said(parrot, f"Repeat after me: {text}") for text in wanted))
    assert answers == wanted
    assert await said(parrot, "Hello") == NOTHING_TO_REPEAT


async def test_a_prompt_whose_thoughts_are_off_is_answered_alike(
    parrot: httpx2.AsyncClient,
) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert await said(parrot, "Repeat after me: yes", **off) == "yes"


async def test_its_prompts_may_come_from_the_cache(parrot: httpx2.AsyncClient) -> None:
    body = chat("A long preface, again and again. " * 20 + "Repeat after me: same", seed=1)
    answers = [(await parrot.post(CHAT, json=body)).json() for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert cached[1] > 500


def test_the_answers_of_tools_are_said_again() -> None:
    tools = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    prompt = f"<|im_start|>user\n{tools}<|im_end|>\n<|im_start|>assistant\n"
    assert told_answer(prompt) == "sunny, rain"
