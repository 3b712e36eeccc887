"""A row of the table: a behaviour that a client can see, or a request that is refused.

A row holds for each of its APIs, streamed and whole. Where one of them differs, the row has a `but`
for it: other values of the row's own fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.api.anthropic_wire import Messages
from tests.api.ollama_wire import OllamaChat, OllamaGenerate
from tests.api.openai_wire import Chat, Completions, Responses
from tests.api.wire import Answer, Api, Ask, Call
from tests.server.harness import Json

CHAT, COMPLETIONS, RESPONSES = Chat(), Completions(), Responses()
MESSAGES, OLLAMA, GENERATE = Messages(), OllamaChat(), OllamaGenerate()
FOUR: tuple[Api, ...] = (CHAT, RESPONSES, MESSAGES, OLLAMA)
ALL: tuple[Api, ...] = (*FOUR, COMPLETIONS, GENERATE)
OPENAIS: tuple[Api, ...] = (CHAT, RESPONSES)
WITH_CHOICE: tuple[Api, ...] = (*OPENAIS, MESSAGES)
SAMPLING: tuple[Api, ...] = (*WITH_CHOICE, COMPLETIONS)
THINKING: tuple[Api, ...] = (*FOUR, GENERATE)
Differences = Mapping[Api, Mapping[str, Any]]


@dataclass(frozen=True)
class Behaviour:
    """What the model says, what a client asks, what the engine hears, what must come back."""

    name: str
    """A sentence."""
    says: str | None = "Yes."
    """None: what the model makes of the prompt by itself."""
    ask: Ask = field(default_factory=Ask)
    fields: Json = field(default_factory=dict)
    """More fields of the body, as they are."""
    text: str | tuple[str, ...] | None = None
    """What is read; of several, one. None: all that the model says."""
    is_read: bool = True
    """False: it is drawn by chance."""
    thoughts: str = ""
    calls: Sequence[Call] = ()
    finish: str = "stop"
    tokens: int | None = None
    thought_tokens: int | None = None
    logprobs: Sequence[str] = ()
    """The tokens that have them."""
    parts: Sequence[str] | None = None
    stopped_by: str = ""
    prompt: str | None = None
    """What the model reads."""
    heard: Json = field(default_factory=dict)
    """Fields of the engine's request or of its parameters."""
    held: bool | None = None
    """Whether something holds the answer to a form."""
    headers: Mapping[str, str | None] = field(default_factory=dict)
    apis: Sequence[Api] = FOUR
    but: Differences = field(default_factory=dict)

    def adapt(self, api: Api) -> "Behaviour":
        return replace(self, **self.but.get(api, {}))

    def write(self, api: Api, *, streamed: bool) -> Json:
        body = api.write(self.ask)
        for name, value in self.fields.items():
            joined = isinstance(body.get(name), dict) and isinstance(value, dict)
            body[name] = body[name] | value if joined else value
        return api.with_stream(body) if streamed else body

    def check(self, answer: Answer) -> None:
        """Compare all that the API tells."""
        texts = self.text if isinstance(self.text, tuple) else (self.text,)
        text = texts[0] if answer.text not in texts else answer.text
        expected = {
            "thoughts": self.thoughts,
            "text": self.says if text is None else text,
            "calls": list(self.calls),
            "finish": self.finish,
            "tokens": self.tokens,
            "thought_tokens": self.thought_tokens,
            "logprobs": list(self.logprobs),
            "parts": None if self.parts is None else list(self.parts),
            "stopped_by": self.stopped_by,
        }
        told = {name: getattr(answer, name) for name in expected}
        told["logprobs"] = [one["token"] for one in answer.logprobs]
        wrong = {
            name: (told[name], expected[name])
            for name in told
            if told[name] != expected[name] and None not in (told[name], expected[name])
        }
        assert not wrong, f"what came, and what was wanted: {wrong}"
        assert len(set(answer.ids)) == len(answer.ids)
        self._check_logprobs(answer)

    def _check_logprobs(self, answer: Answer) -> None:
        """A greedy answer's tokens are the likeliest ones, and their bytes are the text's."""
        told = [one for one in answer.logprobs if "bytes" in one]
        for one in told:
            top = one["top_logprobs"]
            assert len(top) == self.ask.logprobs
            assert [other["logprob"] for other in top[:1]] in ([], [one["logprob"]])
            assert one["logprob"] < 0
        text = bytes(byte for one in told for byte in one["bytes"]).decode()
        assert not told or text.endswith(answer.text)


@dataclass(frozen=True)
class Refusal:
    """A field, and the values with which a request is refused by that field's name."""

    name: str
    """A sentence."""
    place: str = ""
    """The field, by OpenAI's name."""
    values: Sequence[Any] = ()
    bodies: Sequence[Json] = ()
    """Other fields of bodies that are refused."""
    param: str | None = ""
    """What the error names; "": the field."""
    status: int = 400
    message: str = ""
    """A part of the error's message."""
    apis: Sequence[Api] = FOUR
    but: Differences = field(default_factory=dict)

    def adapt(self, api: Api) -> "Refusal":
        return replace(self, **self.but.get(api, {}))

    def write_bodies(self, api: Api) -> Iterator[tuple[Json, str | None]]:
        """What is sent, and what the error names."""
        place = api.names.get(self.place, self.place)
        param = place if self.param == "" else self.param
        for given in (*({place: value} for value in self.values), *self.bodies):
            body = api.write(Ask())
            for path, value in given.items():
                put(body, path, value)
            yield body, param


def put(body: Json, path: str, value: Any) -> None:
    """Set a field that may be one of another's."""
    name, _, inner = path.partition(".")
    if inner:
        put(body.setdefault(name, {}), inner, value)
    else:
        body[name] = value


def list_behaviours(rows: Sequence[Behaviour]) -> list[Any]:
    """Each row for each of its APIs, whole and streamed."""
    return [
        pytest.param(
            row.adapt(api), api, streamed, id=f"{row.name} [{api}{', streamed' * streamed}]"
        )
        for row in rows
        for api in row.apis
        for streamed in (False, True)
    ]


def list_refusals(rows: Sequence[Refusal]) -> list[Any]:
    return [
        pytest.param(row.adapt(api), api, id=f"{row.name} [{api}]")
        for row in rows
        for api in row.apis
        if api.names.get(row.place, row.place) or row.bodies
    ]
