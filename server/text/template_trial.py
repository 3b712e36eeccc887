"""Try a chat template, which is a program of others, in a process of its own before anybody chats.

``python -m server.text.template_trial`` is that process. It has little time and memory, and gets
nothing of this one but the template.
"""

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import psutil

# Until the process can begin, most of it imports; of the trial itself; and of the whole process.
START_LIMIT_S = 60.0
LIMIT_S = 5.0
LIMIT_BYTES = 1 << 30
POLL_S = 0.02
MAX_FAULT_CHARS = 300
READY = b"ready\n"
# What Python may need to start as this one did.
KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
)
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


def try_template(texts: Sequence[str], special_tokens: Mapping[str, Any]) -> TemplateTrial:
    """Try templates in a process of its own. texts: the model's templates. special_tokens: by the
    names that templates have for them."""
    # There may be keys in the environment, and modules of others in the working directory.
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    command = [sys.executable, "-P", "-m", "server.text.template_trial"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin as given:
                given.write(json.dumps([list(texts), dict(special_tokens)], default=str).encode())
            output, excess = _watch(process, process.stdout)
        finally:
            process.kill()
    begun, _, outcome = output.partition(READY)
    if output and not begun and outcome and not excess:
        return TemplateTrial(json.loads(outcome))
    fault = excess or f"the process that tried it ended with {process.returncode}"
    return TemplateTrial(fault, ends=READY not in output)


def _watch(process: "subprocess.Popen[bytes]", stdout: IO[bytes]) -> tuple[bytes, str]:
    """Return what a process writes to its end, and the limit that it exceeds: empty where it ends
    before."""
    watched, output = psutil.Process(process.pid), b""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if select.select([stdout], [], [], POLL_S)[0]:
            more = os.read(stdout.fileno(), 4096)
            if not more:
                return output, ""
            if READY not in output and READY in output + more:
                deadline = time.monotonic() + LIMIT_S
            output += more
        with suppress(psutil.Error):
            if watched.memory_info().rss > LIMIT_BYTES:
                return output, f"it takes more than {LIMIT_BYTES >> 20} MiB of memory"
    return output, f"it takes more than {LIMIT_S if READY in output else START_LIMIT_S:.0f} s"


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
    from transformers.utils.chat_template_utils import render_jinja_template

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
            except Exception as error:
                if request is PLAIN:
                    fault = fault or fault_of(error, with_message=True)
    return fault


def main() -> None:
    """Run the process: read templates and tokens, and write what came of them."""
    texts, special_tokens = json.load(sys.stdin)
    import transformers.utils.chat_template_utils  # noqa: F401 - none of the trial's time

    os.write(1, READY)
    os.write(1, json.dumps(render_all(texts, special_tokens)).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
