"""Agents by the API that they speak. What the model said goes back as the API gave it to them."""

import json
from collections.abc import Callable
from typing import Any, Protocol

import httpx2

from tests.clients.traces.conversation import SYSTEM, TOOLS
from tests.server.harness import posted

Json = dict[str, Any]
MAX_TOKENS = 2000
EPHEMERAL = {"type": "ephemeral"}


class Agent(Protocol):
    """One conversation over one API."""

    def ask(self, text: str) -> None:
        """The person says something."""

    async def turn(self, http: httpx2.AsyncClient) -> int:
        """Sends the conversation and takes the answer into it. Returns how many tokens of the
        prompt came from the cache."""

    def hear(self, text: str) -> None:
        """A tool has answered the last call."""

    @property
    def miss(self) -> Json | None:
        """Where the last prompt left what was cached, and why."""

    @property
    def reports(self) -> bool:
        """Whether its API has a place for that."""


class ChatAgent:
    """/v1/chat/completions. It is told to resend as it received; habits change that."""

    reports = True

    def __init__(self, resent: Callable[[list[Json]], list[Json]] = list) -> None:
        """resent: what is sent of the messages so far, from the first one on each time."""
        self.messages: list[Json] = [{"role": "system", "content": SYSTEM}]
        self.miss: Json | None = None
        self._resent = resent

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def hear(self, text: str) -> None:
        (call,) = self.messages[-1]["tool_calls"]
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    async def turn(self, http: httpx2.AsyncClient) -> int:
        body = {
            "messages": self._resent(self.messages),
            "tools": [{"type": "function", "function": tool} for tool in TOOLS],
            "max_tokens": MAX_TOKENS,
            "cache_report": True,
        }
        found = await posted(http, "/v1/chat/completions", body)
        self.messages.append(found["choices"][0]["message"])
        details = found["usage"]["prompt_tokens_details"]
        self.miss = details["cache_miss"]
        return int(details["cached_tokens"])


class MessagesAgent:
    """/v1/messages, as Claude Code uses it: a billing header that changes with every request, and
    cache_control on the newest message alone."""

    reports = False
    miss = None

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._requests = 0

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def hear(self, text: str) -> None:
        use = self.messages[-1]["content"][-1]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": text}
        self.messages.append({"role": "user", "content": [result]})

    async def turn(self, http: httpx2.AsyncClient) -> int:
        self._requests += 1
        bill = f"x-anthropic-billing-header: cc_version=2.1.197; cch={self._requests * 7919:x};"
        *before, newest = self.messages
        *parts, last = newest["content"]
        marked = newest | {"content": [*parts, last | {"cache_control": EPHEMERAL}]}
        body = {
            "model": await model(http),
            "max_tokens": MAX_TOKENS,
            "system": [
                {"type": "text", "text": bill},
                {"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL},
            ],
            "messages": [*before, marked],
            "tools": [
                {
                    "name": tool["name"],
                    "description": tool["description"],
                    "input_schema": tool["parameters"],
                }
                for tool in TOOLS
            ],
            "thinking": {"type": "adaptive"},
        }
        found = await posted(http, "/v1/messages?beta=true", body)
        self.messages.append({"role": "assistant", "content": found["content"]})
        return int(found["usage"]["cache_read_input_tokens"])


class ResponsesAgent:
    """/v1/responses, as Codex uses it: nothing is stored, all items are resent."""

    reports = False
    miss = None

    def __init__(self, *, stored: bool = False) -> None:
        """stored: the server remembers what was said, and only what is new is sent."""
        self.items: list[Json] = [{"role": "developer", "content": SYSTEM}]
        self._stored = stored
        self._last_id: str | None = None
        self._call_id = ""

    def ask(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def hear(self, text: str) -> None:
        answer = {"type": "function_call_output", "call_id": self._call_id, "output": text}
        self.items.append(answer)

    async def turn(self, http: httpx2.AsyncClient) -> int:
        body: Json = {
            "model": await model(http),
            "input": self.items,
            "tools": [{"type": "function", **tool} for tool in TOOLS],
            "store": self._stored,
            "max_output_tokens": MAX_TOKENS,
        }
        if self._last_id is not None:
            body["previous_response_id"] = self._last_id
        found = await posted(http, "/v1/responses", body)
        for item in found["output"]:
            self._call_id = item.get("call_id", self._call_id)
        if self._stored:
            self._last_id, self.items = found["id"], []
        else:
            self.items += found["output"]
        return int(found["usage"]["input_tokens_details"]["cached_tokens"])


# --- habits of chat agents -------------------------------------------------------------------


def without_thoughts(messages: list[Json]) -> list[Json]:
    """Most agents drop what they have no field for."""
    thoughts = ("reasoning", "reasoning_content")
    return [{k: v for k, v in message.items() if k not in thoughts} for message in messages]


def with_calls_rewritten(messages: list[Json]) -> list[Json]:
    """Agents that keep arguments as objects write them with spaces and an order of their own."""
    return [
        message | {"tool_calls": [_rewritten(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _rewritten(call: Json) -> Json:
    arguments = json.loads(call["function"]["arguments"])
    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    return call | {"function": call["function"] | {"arguments": text}}


def with_a_clock_in_the_system_prompt(messages: list[Json]) -> list[Json]:
    """The time, or a list of open files, at the end of the system prompt."""
    system, *rest = messages
    return [system | {"content": f"{system['content']}It is {len(messages)} past ten.\n"}, *rest]


def with_a_clock_in_the_newest_question(messages: list[Json]) -> list[Json]:
    """What is true now stands in the newest message of the person alone."""
    newest = max(i for i, message in enumerate(messages) if message["role"] == "user")
    asked = messages[newest]
    now = asked | {"content": f"{asked['content']}\nIt is {len(messages)} past ten."}
    return [*messages[:newest], now, *messages[newest + 1 :]]


def as_parts_with_rolling_markers(messages: list[Json]) -> list[Json]:
    """Content in parts; the two newest messages carry cache_control."""
    parted = []
    for place, message in enumerate(messages):
        part: Json = {"type": "text", "text": message["content"] or ""}
        if place >= len(messages) - 2:
            part["cache_control"] = EPHEMERAL
        parted.append(message | {"content": [part]})
    return parted


# --- requests --------------------------------------------------------------------------------


async def model(http: httpx2.AsyncClient) -> str:
    """The name of the served one."""
    (only,) = (await http.get("/v1/models")).json()["data"]
    return str(only["id"])
