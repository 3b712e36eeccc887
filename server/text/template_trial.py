"""Render test conversations with a chat template before the first chat, and end slow templates."""

import asyncio
import ctypes
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvcache.child import Limits
from server.text.template_sandbox import render_template

T = TypeVar("T")
# Python raises an asynchronous exception before the thread has run this number of lines.
LINES = 100


class TimeUp(BaseException):
    """Raised in code that takes too long. Foreign code must not catch TimeUp as an Exception."""


class TimeLimit:
    """Raises TimeUp in the code within ``with limit:`` if the code takes too long.

    An operation in C cannot be ended. TimeUp may also be raised at the end of the ``with``
    statement, so catch TimeUp outside."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` is the limit, measured from the beginning of the ``with`` statement."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._deadline = float("inf")
        self._ended = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work``, which contains the ``with`` statement, in a thread with a time limit."""
        self._look()
        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            self._watching.cancel()

    def _look(self) -> None:
        """Raise TimeUp in the code if its time is up. Otherwise schedule the next check."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.end()
        else:
            loop, wait_s = asyncio.get_running_loop(), min(left, self._seconds)
            self._watching = loop.call_later(wait_s, self._look)

    def end(self) -> None:
        """Raise TimeUp once in the limited code, or when the code begins if it has not begun."""
        if self._ended:
            return  # take no lock here: TimeUp may have hit the thread that holds it
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
            # TimeUp is pending for this thread. Wait until TimeUp is raised, so that it reaches no
            # other code. If TimeUp were cancelled, the interpreter would check for it forever.
            for _ in range(LINES):
                time.sleep(0)
            raise TimeUp


LIMITS = Limits(5.0, 5.0, 1 << 30)
MAX_FAULT_CHARS = 300
TEMPLATE_FILE = "<template>"

USER, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
PLAIN: dict[str, Any] = {"messages": [USER]}
# A template may refuse these conversations, but must not exceed the limits.
OTHERS: tuple[dict[str, Any], ...] = (
    {"messages": [SYSTEM, USER, ANSWER, USER]},
    {"messages": [USER, ANSWER, SYSTEM, USER]},
    {"messages": [SYSTEM, ANSWER]},
    {"messages": [USER, USER]},
    {"messages": [SYSTEM, {"role": "user", "content": ""}, ANSWER]},
    {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]},
    {"messages": [USER], "enable_thinking": False},
)


def fault_of(error: Exception, *, with_message: bool) -> str:
    """Return a description of a template's error, with its line. ``with_message`` adds the error's
    message, which may quote chats."""
    line = getattr(error, "lineno", None)
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == TEMPLATE_FILE:
            line = frame.lineno
    place = "" if line is None else f" in line {line}"
    message = f": {str(error).strip().partition(chr(10))[0]}" if with_message else ""
    return f"{type(error).__name__}{place}{message}"[:MAX_FAULT_CHARS]


def render_all(texts: Sequence[str], special_tokens: Mapping[str, Any]) -> str:
    """Render test conversations with a model's templates, whose variables ``special_tokens`` are.
    Return the error of the plain conversation, or ""."""
    fault = ""
    for text in texts:
        for request in (PLAIN, *OTHERS):
            others = {name: value for name, value in request.items() if name != "messages"}
            arguments = {**special_tokens, **others, "add_generation_prompt": True}
            try:
                render_template(text, request["messages"], **arguments)
            except MemoryError:
                raise
            except Exception as error:
                if request is PLAIN:
                    fault = fault or fault_of(error, with_message=True)
    return fault
