"""Random-weight models must answer as schemas and tools say: ``python -m tests.structured``.

A model is asked sixteen things at a time. A validator that shares nothing with the grammars judges
every answer. A random model would think without end: every fifth answer begins within thoughts that
a budget ends, and all others are told not to think."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from jsonschema import Draft202012Validator, FormatChecker
from tokenizers import pre_tokenizers

from engine.build import build_engine, plan_engine
from engine.machine import machine_memory
from engine.models.checkpoint import read_checkpoint
from server.text.tokenizer import Tokenizer
from tests.engines import CONFIG, ON_CPU, started
from tests.models import (
    PLAIN_ADDED_TOKENS,
    TEMPLATE,
    TINY,
    XML_TEMPLATE,
    write_model,
    write_tokenizer,
)
from tests.server.harness import CHAT, Json, events, serving, streamed
from tests.structured.schemas import SCHEMAS, TOOLS

AT_A_TIME = 16
MAX_TOKENS = 6000
MODEL_LEN = 8192
THOUGHT_TOKENS = 12
TWIN_EVERY = 10
TEXTS = ("content", "reasoning_content")
GIB = 1024**3
STOP_S = 30.0
FORMATS = FormatChecker(["uuid", "ipv4"])
CALL_TAGS = ("<tool_call>", "</tool_call>")
TEMPLATES = {"hermes": TEMPLATE, "xml": XML_TEMPLATE}
NO_REASONING = "{{- '<think>\\n\\n</think>\\n\\n' }}"
# The byte-level alphabet begins the vocabulary; a call may follow another one on a new line.
LINE_BREAK = str(sorted(pre_tokenizers.ByteLevel.alphabet()).index("\u010a"))
MORE_CALLS = {LINE_BREAK: 3}


@dataclass
class Outcome:
    """Counts of the answers of a part."""

    name: str
    asked: int = 0
    valid: int = 0
    streamed: int = 0
    calls: int = 0
    thoughts: int = 0
    """Answers that thought before."""
    twins: int = 0
    """Answers that were asked for once more, streamed where they were whole and whole where they
    were streamed, and were the same."""
    tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        ends = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.finished.items()))
        calls = f"; {self.calls} calls" if self.calls else ""
        return (
            f"{self.name}: {self.valid} valid of {self.asked} asked ({ends}; "
            f"{self.streamed} streamed, {self.twins} the same both ways, "
            f"{self.thoughts} after thoughts{calls}), {self.tokens} tokens of whole answers"
        )


@dataclass(frozen=True)
class Question:
    """A request and the schemas of its answer."""

    body: Json
    schemas: dict[str, Any]
    """One, or those of the tools that may be called by their names."""
    calls: bool
    one_call: bool = False


def form_questions(count: int) -> list[Question]:
    """Use the schemas in turn; every other answer is streamed, every fifth comes after thoughts."""
    names = list(SCHEMAS)
    return [
        Question(
            body(number)
            | {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "it", "strict": True, "schema": schema},
                }
            },
            {"": schema},
            calls=False,
        )
        for number in range(count)
        for schema in [SCHEMAS[names[number % len(names)]]]
    ]


def call_questions(count: int) -> list[Question]:
    """Offer all tools, one of them by its name, or three that are allowed; one call or several."""
    names = list(TOOLS)
    questions = []
    for number in range(count):
        name = names[number % len(names)]
        some = [names[(number + step) % len(names)] for step in range(3)]
        choice, may = [
            ("required", names),
            ({"type": "function", "function": {"name": name}}, [name]),
            (allowed(some), some),
        ][number // len(names) % 3]
        one = number % 7 < 4
        asked = body(number) | {
            "tools": [function(tool) for tool in names],
            "tool_choice": choice,
            "parallel_tool_calls": not one,
            "logit_bias": MORE_CALLS if number % 7 == 6 else {},
        }
        questions.append(Question(asked, {tool: TOOLS[tool] for tool in may}, True, one))
    return questions


def function(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": TOOLS[name]}}


def allowed(names: list[str]) -> Json:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}


def body(number: int) -> Json:
    """Stream half of the answers, in no step with the schemas."""
    thinks = number % 5 == 0
    thoughts = {"thinking_token_budget": THOUGHT_TOKENS} if thinks else {"enable_thinking": False}
    return {
        "messages": [{"role": "user", "content": "Go on."}],
        "temperature": 1,
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "stream": number // 3 % 2 == 0,
        **thoughts,
    }


async def prove(name: str, folder: Path, tool_format: str, questions: list[Question]) -> Outcome:
    outcome = Outcome(name, len(questions))
    turns = asyncio.Semaphore(AT_A_TIME)
    async with server(folder, tool_format) as http:

        async def one(question: Question) -> None:
            async with turns:
                await ask(http, question, outcome)

        await asyncio.gather(*map(one, questions))
    return outcome


async def ask(http: httpx2.AsyncClient, question: Question, outcome: Outcome) -> None:
    """Send one request; its answer is whole or in events, and is judged alike."""
    try:
        reason, message = await answer(http, question.body, outcome)
    except RefusedError as error:
        outcome.problems.append(str(error))
        return
    outcome.streamed += question.body["stream"]
    outcome.finished[reason] += 1
    outcome.thoughts += bool(message["reasoning_content"])
    problem = judge(question, reason, message, outcome)
    if problem is None and question.body["seed"] % TWIN_EVERY == 0:
        other = question.body | {"stream": not question.body["stream"]}
        outcome.twins += 1
        if await answer(http, other, outcome) != (reason, message):
            problem = "it differs from the same answer asked for the other way"
    if problem is None:
        outcome.valid += 1
    else:
        outcome.problems.append(f"seed {question.body['seed']}: {problem}")


class RefusedError(Exception):
    """No answer, but an error."""


async def answer(http: httpx2.AsyncClient, body: Json, outcome: Outcome) -> tuple[str, Json]:
    """Return the finish reason and the message, in the same form both ways. Raises RefusedError."""
    response = await http.post(CHAT, json=body, timeout=None)
    if response.status_code != 200:
        raise RefusedError(f"{response.status_code}: {response.text[:300]}")
    if body["stream"]:
        return joined(events(response.text))
    (choice,) = response.json()["choices"]
    outcome.tokens += response.json()["usage"]["completion_tokens"]
    message = choice["message"]
    texts = {name: message.get(name) or "" for name in TEXTS}
    calls = [{"function": call["function"]} for call in message.get("tool_calls", ())]
    return choice["finish_reason"], texts | {"tool_calls": calls}


def joined(chunks: list[Json]) -> tuple[str, Json]:
    """Return the finish reason and the message of a stream."""
    calls: dict[int, Json] = {}
    reason = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            for part in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
                for name, text in part["function"].items():
                    call["function"][name] += text
    message: Json = {name: streamed(chunks, name) for name in TEXTS}
    return reason, message | {"tool_calls": [calls[index] for index in sorted(calls)]}


def judge(question: Question, reason: str, message: Json, outcome: Outcome) -> str | None:
    """Return the fault of an answer, or None."""
    if not question.calls:
        if reason != "stop":
            return f"it ends with {reason}: ...{message['content'][-80:]!r}"
        return invalid(message["content"], question.schemas[""])
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    outcome.calls += len(calls)
    if reason != "tool_calls" or not calls:
        last = calls[-1]["arguments"] if calls else message.get("content") or ""
        return f"it ends with {reason} and {len(calls)} calls: ...{last[-80:]!r}"
    if message.get("content") or (question.one_call and len(calls) != 1):
        return f"{len(calls)} calls, and content: {message.get('content')!r}"
    for call in calls:
        if call["name"] not in question.schemas:
            return f"{call['name']} may not be called"
        if problem := invalid(call["arguments"], question.schemas[call["name"]]):
            return f"{call['name']}: {problem}"
    return None


def invalid(text: str, schema: Any) -> str | None:
    """Return why a text is no JSON that satisfies a schema, or None."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}: {text[:200]!r}"
    validator = Draft202012Validator(schema, format_checker=FORMATS)
    faults = [fault.message for fault in validator.iter_errors(value)]
    return f"{faults[0][:200]} in {text[:200]!r}" if faults else None


@asynccontextmanager
async def server(folder: Path, tool_format: str) -> AsyncIterator[httpx2.AsyncClient]:
    """The whole application in this process, around a random-weight model of two layers.

    The tags of calls are tokens where calls are hermes', and are spelt where they are XML.
    """
    write_model(folder, TINY)
    tags = CALL_TAGS if tool_format == "hermes" else ()
    open_thoughts = "{%- else %}{{- '<think>\\n' }}"
    template = TEMPLATES[tool_format].replace(NO_REASONING, NO_REASONING + open_thoughts)
    assert open_thoughts in template
    plain = (*PLAIN_ADDED_TOKENS, *tags)
    write_tokenizer(folder, TINY.vocab_size, template=template, plain=plain)
    checkpoint = read_checkpoint(folder)
    config = replace(
        CONFIG,
        page_bytes=None,
        kv_budget_bytes=GIB,
        free_slack_bytes=GIB // 4,
        max_model_len=MODEL_LEN,
        max_num_seqs=AT_A_TIME,
        max_num_batched_tokens=2048,
        threads=2,
        check_every_step=False,
    )
    memory = replace(machine_memory(), available_bytes=2 * GIB)
    plan = plan_engine(config, checkpoint, memory, ON_CPU["posix"])
    client = started(
        lambda emit: build_engine(plan, config, lambda *_: None, emit),
        max_queue=AT_A_TIME,
        max_backlog=MAX_TOKENS,
    )
    try:
        stops = frozenset(checkpoint.eos_token_ids)
        async with serving(client, Tokenizer(folder), stop_token_ids=stops) as (_, http):
            yield http
    finally:
        assert client.stop(STOP_S)


MOST_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structured", description=__doc__)
    parser.add_argument("--answers", type=int, default=500, help="of each part")
    answers = parser.parse_args(arguments).answers
    print(f"{len(SCHEMAS)} schemas, {len(TOOLS)} tools, {AT_A_TIME} requests at a time")
    with tempfile.TemporaryDirectory(prefix="quire-structured-") as name:
        outcomes = asyncio.run(_run(Path(name), answers))
    for outcome in outcomes:
        for problem in outcome.problems[:MOST_SHOWN]:
            print(f"{outcome.name}: {problem}")
    return int(any(outcome.valid < outcome.asked for outcome in outcomes))


async def _run(folder: Path, answers: int) -> list[Outcome]:
    parts = (
        ("json_schema", "hermes", form_questions(answers)),
        ("calls, hermes", "hermes", call_questions(answers)),
        ("calls, XML", "xml", call_questions(answers)),
    )
    outcomes = []
    for number, (name, tool_format, questions) in enumerate(parts):
        started_s = time.monotonic()
        outcomes.append(await prove(name, folder / str(number), tool_format, questions))
        print(f"{outcomes[-1]}, {time.monotonic() - started_s:.0f} s", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
