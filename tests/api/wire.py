"""The APIs as their clients see them: what they send, and what they make of the answers.

Readers are strict. An answer that no vendor's SDK would type, or whose stream adds up to something
else than its end says, fails in whatever row it comes.
"""

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx2

from server.text.conversation import Tool, Turn
from tests.server.harness import Json

HELLO = Turn("user", "Hello")
LENGTH = 300


@dataclass(frozen=True)
class Ask:
    """What a client wants. Each API has its own words for it."""

    turns: tuple[Turn, ...] = (HELLO,)
    tools: tuple[Tool, ...] = ()
    choice: str | None = None
    """none, required, or the name of the tool that must be called."""
    one_call: bool = False
    stop: tuple[str, ...] = ()
    length: int | None = LENGTH
    form: Any = None
    """A JSON schema."""
    thinks: bool | str | int | None = None
    """Whether, with which effort, or with how many tokens."""
    logprobs: int | None = None
    goes_on: bool = False
    """The last turn is the beginning of the answer."""


Call = tuple[str, Any]
"""A name, and its arguments: as text where they are no JSON."""


@dataclass
class Answer:
    """What a client has read. None and "" are what the API does not tell."""

    thoughts: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: str = ""
    """stop, length, tool_calls."""
    prompt_tokens: int = 0
    tokens: int = 0
    thought_tokens: int | None = None
    logprobs: list[Json] = field(default_factory=list)
    parts: list[str] | None = None
    """The kinds of its parts, in their order."""
    stopped_by: str | None = None
    ids: list[str] = field(default_factory=list)
    """Of all that has one."""


@dataclass(frozen=True)
class Error:
    """Why there is no answer."""

    status: int
    kind: str
    message: str
    param: str | None
    """None where only the message names it."""

    def names(self, param: str | None) -> bool:
        if self.param is not None or param is None:
            return self.param == param
        return bool(re.search(rf"(?<![\w.\]]){re.escape(param)}(?![\w.\[])", self.message))


def read_arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def write_tool(tool: Tool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def read_named_events(text: str) -> list[Json]:
    """The data of events that are all named by their type; comments are skipped."""
    blocks = [one for one in text.removesuffix("\n\n").split("\n\n") if not one.startswith(":")]
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


class Api(ABC):
    """One of the APIs."""

    path: ClassVar[str]
    media_type: ClassVar[str] = "text/event-stream"
    names: ClassVar[dict[str, str]] = {}
    """Fields by their names in other APIs; "" where there is none."""

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def write(self, ask: Ask) -> Json: ...

    @abstractmethod
    def read_whole(self, body: Json) -> Answer: ...

    @abstractmethod
    def read_stream(self, text: str) -> Answer: ...

    def with_stream(self, body: Json) -> Json:
        return body | {"stream": True}

    def read_late_error(self, text: str) -> Json:
        """The last event of a stream, which is an error, and nothing after it."""
        *_, last, end = text.split("\n\n")
        assert end == ""
        assert "[DONE]" not in text
        body: Json = json.loads(last.partition("data: ")[2])
        return body

    def read_error(self, response: httpx2.Response) -> Error:
        (error,) = response.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        return Error(response.status_code, error["type"], error["message"], error["param"])
