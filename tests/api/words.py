"""What a model writes and reads, and values that several tables need."""

import json
from typing import Any

from server.config import LimitsSection
from server.text.conversation import Tool
from tests.server.harness import END, Json

PLACE = {
    "type": "object",
    "properties": {"at": {"enum": ["a", "b"]}, "times": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
LOOK = Tool("look", parameters=PLACE)
WAIT = Tool("wait", parameters=NOTHING)
BOTH = (LOOK, WAIT)
LEFT_OUT, NOT_SHOWN = "X-History-Left-Out", "X-Images-Not-Shown"
IMAGE = "[image not shown: this server reads text only]"
FILE = "[file not shown: this server reads text only]"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
SILENT = "<think>\n\n</think>\n\n"
USER = {"role": "user", "content": "Hello"}
SURROGATE = "\ud800"
LIMITS = LimitsSection()
NAN, INFINITE = float("nan"), float("inf")
NO_NUMBERS: tuple[Any, ...] = (NAN, INFINITE, -INFINITE, "zebra", True, [], {}, [1])
TOO_BIG = (2**70, -(2**70), 10**400)
NO_SCALARS: tuple[Any, ...] = ([1], {}, "zebra" * 60, 2**31, -(2**31), [True])
NO_WHOLE = (*NO_NUMBERS, *TOO_BIG, 1.5, "5")
HELLO_READ = ("user", "Hello")


def think(thoughts: str, text: str = "") -> str:
    return f"<think>\n{thoughts}\n</think>\n\n{text}"


def call(name: str, **arguments: Any) -> str:
    """As the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def render(*turns: tuple[str, str], answer: str = "") -> str:
    """A rendered conversation. answer: what is begun of it."""
    lines = (f"<|im_start|>{role}\n{text}{END}\n" for role, text in turns)
    return "".join(lines) + f"<|im_start|>assistant\n{answer}"


def describe(*tools: Tool) -> str:
    """What a template writes of tools."""
    return "".join(json.dumps(tool.described) + "\n" for tool in tools)


def offer(*tools: Tool) -> tuple[str, str]:
    return "system", describe(*tools) + "<tool_call>"


def say(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def make_function(**fields: Any) -> Json:
    return {"type": "function", "function": fields}


def add_parts(role: str, *parts: Any) -> list[Json]:
    return [USER, {"role": role, "content": list(parts)}]
