"""ollama-python against quire."""

import json
import os
from typing import Any

import pytest
from ollama import Client, ResponseError

RANDOM, PARROT, EMBEDDER = [
    Client(os.environ[f"QUIRE_{name}"]) for name in ("RANDOM", "PARROT", "EMBEDDER")
]
RANDOM_MODEL, MODEL, EMBEDDING_MODEL = [
    client.list().models[0].model or "" for client in (RANDOM, PARROT, EMBEDDER)
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Say what the weather is.

    Args:
        city: where
    """
    return f"sunny in {city}"


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Repeat after me: {text}"}]


# --- what there is ---------------------------------------------------------------------------


def test_models_are_listed_shown_and_running() -> None:
    (listed,) = PARROT.list().models
    assert listed.digest is not None
    assert listed.modified_at is not None
    (running,) = RANDOM.ps().models
    assert running.model == RANDOM_MODEL
    assert running.size is not None
    assert running.size > 0
    assert running.expires_at is not None
    shown = RANDOM.show(RANDOM_MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.details is not None
    assert shown.details.family == "qwen3"
    assert shown.details.format == "safetensors"
    assert shown.modelinfo is not None
    assert shown.modelinfo["qwen3.context_length"] == 8192
    assert EMBEDDER.show(EMBEDDING_MODEL).capabilities == ["embedding"]


# --- chat ------------------------------------------------------------------------------------


def test_a_chat_answers_with_counts_and_times() -> None:
    answer = PARROT.chat(MODEL, say("Grüße 🙂"))
    assert answer.message.content == "Grüße 🙂"
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count
    assert answer.eval_count
    assert answer.total_duration
    assert answer.prompt_eval_duration
    assert answer.total_duration >= answer.prompt_eval_duration


def test_a_stream_is_the_same_answer() -> None:
    parts = list(PARROT.chat(f"{MODEL}:latest", say("bit by bit, to the end"), stream=True))
    assert "".join(part.message.content or "" for part in parts) == "bit by bit, to the end"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count


def test_thoughts_come_apart_and_go_back_in() -> None:
    asked = say("<think>\nHm.\n</think>\n\nYes.")
    message = PARROT.chat(MODEL, asked, think=True).message
    assert (message.thinking, message.content) == ("Hm.", "Yes.")
    again = PARROT.chat(MODEL, [*asked, message, *say("fine")], think="low")
    assert again.message.content == "fine"


def test_a_tool_is_called_and_its_answer_heard() -> None:
    asked = say(f"Let me look.\n{CALL}")
    for stream in (False, True):
        answer: Any = PARROT.chat(MODEL, asked, tools=[get_weather], stream=stream)
        parts = list(answer) if stream else [answer]
        (call,) = [call for part in parts for call in part.message.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
        said = {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}
        heard = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")}
        last = PARROT.chat(MODEL, [*asked, said, heard], tools=[get_weather])
        assert last.message.content == "sunny in Paris"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_keeps_to_a_schema(stream: bool) -> None:
    options = {"num_predict": 2000}
    answer: Any = RANDOM.chat(
        RANDOM_MODEL, say("x"), format=FORECAST, options=options, stream=stream, keep_alive="10m"
    )
    parts = list(answer) if stream else [answer]
    found = json.loads("".join(part.message.content or "" for part in parts))
    assert found["city"] in ("Paris", "Rome")
    assert 1 <= found["days"] <= 7


def test_an_answer_is_as_long_as_is_wanted_and_the_same_for_a_seed() -> None:
    options = {"num_predict": 7, "seed": 3, "temperature": 1.0, "num_ctx": 64}
    one, two = [RANDOM.chat(RANDOM_MODEL, say("x"), options=options) for _ in range(2)]
    assert one.message.content == two.message.content
    assert (one.eval_count, one.done_reason) == (7, "length")


# --- generate, load, embed -------------------------------------------------------------------


def test_a_text_is_generated() -> None:
    answer = PARROT.generate(MODEL, "Repeat after me: one", system="Be brief.")
    assert answer.response == "one"
    parts = list(PARROT.generate(MODEL, "Repeat after me: one", stream=True))
    assert "".join(part.response or "" for part in parts) == "one"
    raw = RANDOM.generate(RANDOM_MODEL, "Once", raw=True, options={"num_predict": 3}, logprobs=True)
    assert raw.eval_count == len(raw.logprobs or ()) == 3


def test_a_model_is_loaded_without_a_question() -> None:
    assert PARROT.generate(MODEL).done_reason == "load"
    assert PARROT.chat(MODEL, keep_alive=0).done_reason == "unload"


def test_texts_become_vectors() -> None:
    answer = EMBEDDER.embed(EMBEDDING_MODEL, ["one", "two"])
    one, two = answer.embeddings
    assert one != two
    assert sum(x * x for x in one) == pytest.approx(1)
    assert len(EMBEDDER.embed(EMBEDDING_MODEL, "one", dimensions=4).embeddings[0]) == 4
    assert EMBEDDER.embeddings(EMBEDDING_MODEL, "one").embedding == pytest.approx(one)


# --- errors ----------------------------------------------------------------------------------


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(ResponseError, match="model 'gpt' not found") as unknown:
        PARROT.chat("gpt", say("x"))
    assert unknown.value.status_code == 404
    with pytest.raises(ResponseError, match=r"maximum context length is \d+ .* \d+ tokens"):
        list(PARROT.chat(MODEL, say("long " * 4000), stream=True, options={"num_ctx": 10**6}))
    with pytest.raises(ResponseError, match="makes no embeddings"):
        PARROT.embed(MODEL, "one")
    with pytest.raises(ResponseError, match="run `quire pull NAME` on its machine"):
        PARROT.pull("qwen3")
