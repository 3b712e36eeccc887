"""Try a chat template, which is a program of others, in a process of its own before anybody chats.

The process has little time and memory, and gets nothing of this one but the template.
"""

import asyncio
import ctypes
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers.utils.chat_template_utils import render_jinja_template

from server.text.limited_process import LimitedProcess, LimitError, Limits

T = TypeVar("T")
# More than it takes until an error that was sent to a thread is raised there.
LINES = 100


class TimeUp(BaseException):
    """The code took too long. No Exception: code that was not written here must not catch it."""


class TimeLimit:
    """End code within ``with limit:`` by TimeUp, at its next line.

    An operation of C has no lines: it is over when it is over, and while it holds the interpreter
    nobody else runs. TimeUp may be raised at the end of the ``with`` statement, too: whoever
    catches it stands around that.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: that the code may take, from when it begins."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._deadline = float("inf")
        self._ended = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run work, which has the ``with`` statement in it, in a worker thread; end what stands
        within when its time is up, or when nobody waits for it any more."""
        self._look()
        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            self._watching.cancel()

    def _look(self) -> None:
        """End what is over its time, and come back for what is not."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.end()
        else:
            loop, wait_s = asyncio.get_running_loop(), min(left, self._seconds)
            self._watching = loop.call_later(wait_s, self._look)

    def end(self) -> None:
        """End what stands within, now or as soon as it begins; once."""
        if self._ended:
            return  # and asks for no lock: TimeUp may have come to who had it
        with self._lock:
            self._ended = True
            if self._thread is not None:
                thread, error = ctypes.c_ulong(self._thread), ctypes.py_object(TimeUp)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)

    def __enter__(self) -> None:
        with self._lock:
            if self._ended:
                raise TimeUp
            self._thread = threading.get_ident()
            self._deadline = time.monotonic() + self._seconds

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._lock:
            self._thread, self._deadline = None, float("inf")
        if self._ended and kind is not TimeUp:
            # It is on its way, and must reach nobody else: it comes at one of the next lines. (It
            # cannot be taken back: that would leave the interpreter looking for it for ever.)
            for _ in range(LINES):
                time.sleep(0)
            raise TimeUp


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
