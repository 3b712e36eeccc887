"""A model whose tokenizer is SentencePiece's answers in text, on every way to it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from server.text.tokenizer import Tokenizer
from tests.models import write_sentencepiece_tokenizer
from tests.server.harness import CHAT, COMPLETIONS, END, Engine, chat, ids_of, prompt, told

TEXTS = ["the the!", "eé\n\tthe  the", "你好、世界 😀", "Привет", "a<b>c {}", '["é"]']
SCHEMA = {"name": "a", "schema": {"enum": ["é你", "b c", {"the": [1, "ш"]}]}, "strict": True}
FORMS = [{"type": "json_schema", "json_schema": SCHEMA}, {"type": "json_object"}]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_sentencepiece_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture
async def http(engine: Engine, sentencepiece: Tokenizer) -> AsyncIterator[httpx2.AsyncClient]:
    async with told(engine, sentencepiece) as client:
        yield client


def says(engine: Engine, tokenizer: Tokenizer, text: str) -> None:
    engine.script[:] = ids_of(tokenizer, text + END)


@pytest.mark.parametrize("text", TEXTS)
async def test_an_answer_is_the_text_that_its_tokens_were_made_of(
    http: httpx2.AsyncClient, engine: Engine, sentencepiece: Tokenizer, text: str
) -> None:
    says(engine, sentencepiece, text)
    whole = (await http.post(CHAT, json=chat())).json()
    assert whole["choices"][0]["message"]["content"] == text
    lines = (await http.post(CHAT, json=chat(stream=True))).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if '"delta"' in line]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    back = await http.post("/detokenize", json={"tokens": ids_of(sentencepiece, text)})
    assert back.json()["prompt"] == text


async def test_a_space_at_the_beginning_of_what_goes_on_with_a_text_is_text(
    http: httpx2.AsyncClient, engine: Engine, sentencepiece: Tokenizer
) -> None:
    says(engine, sentencepiece, "the é")
    echoed = await http.post(COMPLETIONS, json=prompt("a b", echo=True))
    assert echoed.json()["choices"][0]["text"] == "a b the é"
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    found = await http.post(CHAT, json={"messages": begun, "temperature": 0} | fields)
    assert found.json()["choices"][0]["message"]["content"] == " the é"


@pytest.mark.parametrize("stop", ["\n", " the", "é!", "你", "b c", "}"])
async def test_a_stop_string_ends_an_answer(
    http: httpx2.AsyncClient, engine: Engine, sentencepiece: Tokenizer, stop: str
) -> None:
    says(engine, sentencepiece, f"xyz{stop}abc")
    (choice,) = (await http.post(CHAT, json=chat(stop=[stop]))).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("xyz", "stop")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", FORMS, ids=["json_schema", "json_object"])
async def test_an_answer_of_a_form_is_json(
    http: httpx2.AsyncClient, form: dict[str, Any], seed: int
) -> None:
    fields = {"response_format": form, "temperature": 2.0, "seed": seed, "max_tokens": 200}
    (choice,) = (await http.post(CHAT, json=chat() | fields)).json()["choices"]
    content, is_cut = choice["message"]["content"], choice["finish_reason"] == "length"
    assert "<0x" not in content
    assert is_cut or isinstance(json.loads(content), str | dict)
