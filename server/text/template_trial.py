"""Try a chat template, which is a program of others, in a process of its own before anybody chats.

The process has little time and memory, and gets nothing of this one but the template.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from server.text.limited_process import LimitedProcess, LimitError, Limits

LIMITS = Limits(5.0, 1 << 30)
MAX_FAULT_CHARS = 300
# What jinja calls the text of a template in tracebacks.
TEMPLATE_FILE = "<template>"

USER, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
PLAIN: dict[str, Any] = {"messages": [USER]}
# What some templates refuse; but they come to an end.
OTHERS: tuple[dict[str, Any], ...] = (
    {"messages": [SYSTEM, USER, ANSWER, USER]},
    {"messages": [USER, ANSWER, SYSTEM, USER]},
    {"messages": [SYSTEM, ANSWER]},
    {"messages": [SYSTEM, {"role": "user", "content": ""}, ANSWER]},
    {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]},
    {"messages": [USER], "enable_thinking": False},
)


@dataclass(frozen=True, slots=True)
class TemplateTrial:
    """The result of a trial."""

    fault: str
    """Why a plain conversation was not rendered; empty where it was."""
    ends: bool = True
    """Whether the template comes to an end, within time and memory."""


def try_template(
    process: LimitedProcess, texts: Sequence[str], special_tokens: Mapping[str, Any]
) -> TemplateTrial:
    """Try templates in a process. texts: the model's templates. special_tokens: by the names that
    templates have for them."""
    try:
        return TemplateTrial(process.call(LIMITS, render_all, list(texts), dict(special_tokens)))
    except LimitError as error:
        return TemplateTrial(str(error), ends=not error.begun)


def fault_of(error: Exception, *, with_message: bool) -> str:
    """Return what went wrong in a template, and where. with_message: also what the error says,
    which may repeat what was to be rendered."""
    line = getattr(error, "lineno", None)
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == TEMPLATE_FILE:
            line = frame.lineno
    place = "" if line is None else f" in line {line}"
    message = f": {str(error).strip().partition(chr(10))[0]}" if with_message else ""
    return f"{type(error).__name__}{place}{message}"[:MAX_FAULT_CHARS]


def render_all(texts: Sequence[str], special_tokens: Mapping[str, Any]) -> str:
    """Render conversations of all kinds. Return why a plain one could not be rendered, or ""."""
    fault = ""
    for text in texts:
        for request in (PLAIN, *OTHERS):
            others = {name: value for name, value in request.items() if name != "messages"}
            try:
                render_jinja_template(
                    conversations=[request["messages"]],
                    chat_template=text,
                    add_generation_prompt=True,
                    **{**special_tokens, **others},
                )
            except MemoryError:
                raise
            except Exception as error:
                if request is PLAIN:
                    fault = fault or fault_of(error, with_message=True)
    return fault
