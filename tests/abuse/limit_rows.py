"""Bodies as large as each limit lets them be, and one larger: the rows of costs.py."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.config import LimitsSection
from server.http.guards.connections import MAX_HEADER_BYTES
from server.protocol.chat.tools import MAX_TOOLS
from server.protocol.common import (
    MAX_DEPTH,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    BodyLimits,
    limits_by_path,
)
from server.protocol.embeddings import MAX_INPUTS
from server.text.grammar.worker import MAX_SPEC_BYTES
from tests.abuse.clients import request
from tests.fuzz.watch import CLOSE

Body = Callable[[int, str], bytes]
"""Of a size, and a letter in which bodies of one size differ: nothing is in any cache."""
LIMITS = LimitsSection()
BY_PATH = limits_by_path(LIMITS)
EMBEDDINGS = "/v1/embeddings"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SLOT = "§"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to reach a limit."""

    limit: str
    unit: str
    most: int
    path: str
    body: Body
    what: str = ""
    """Beside the path, where that has several rows."""
    grain: int = 1
    """So much more is beyond the limit."""
    refusal: int = 400
    is_head: bool = False
    """The body is a header's value."""

    @property
    def name(self) -> str:
        """Its own."""
        return " ".join(filter(None, (self.limit, self.path, self.what)))

    @property
    def embeds(self) -> bool:
        """Whether its model makes vectors."""
        return self.path == EMBEDDINGS

    def request(self, n: int, mark: str) -> bytes:
        """All that is sent."""
        body = self.body(n, mark)
        if self.is_head:
            return request("GET", self.path, CLOSE | {"X-Filler": body.decode()})
        return request("POST", self.path, CLOSE, body)


# --- bodies --------------------------------------------------------------------------------------


def text(frame: str, n: int, mark: str, *, word: str = "a", less: int = 0) -> bytes:
    """n bytes, less so many. frame: has a slot for the text that fills them."""
    length = n - less - len(frame.encode()) + len(SLOT.encode())
    return frame.replace(SLOT, (mark + word * (length // len(word) + 1))[:length]).encode()


def parts(frame: str, one: str, n: int, mark: str, *, each: int = 1, base: int = 0) -> bytes:
    """A list of so many that they count as n. one: of the list; with its number where it has a
    slot. each, base: what each counts, and what the rest does."""
    count = (n - base) // each
    first, rest = (one.replace("a", mark), one)
    made = ((rest if number else first).replace(SLOT, f"{mark}{number}") for number in range(count))
    return frame.replace(SLOT, ",".join(made)).encode()


def nested(frame: str, n: int, mark: str) -> bytes:
    """n lists and objects around each other, the outermost of which is the frame."""
    del mark
    return frame.replace(SLOT, "[" * (n - 1) + "0" + "]" * (n - 1)).encode()


def dumped(make: Callable[[int, str], Any], n: int, mark: str) -> bytes:
    """What is made, as JSON."""
    return json.dumps(make(n, mark)).encode()


def ids(n: int, mark: str) -> str:
    """So many token ids."""
    return ",".join([str(ord(mark)), *["65"] * (n - 1)])


ONE_MESSAGE = '"messages":[{"role":"user","content":%s}]'
TEXT_FRAMES = {
    CHAT: '{"max_tokens":1,' + ONE_MESSAGE + "}",
    MESSAGES: '{"max_tokens":1,' + ONE_MESSAGE + "}",
    COUNT: "{" + ONE_MESSAGE + "}",
    "/v1/responses": '{"max_output_tokens":1,"input":[{"role":"user","content":%s}]}',
    "/v1/responses/input_tokens": '{"input":[{"role":"user","content":%s}]}',
    "/tokenize": "{" + ONE_MESSAGE + "}",
}
ID_FRAMES = {
    COMPLETIONS: '{"max_tokens":1,"prompt":[%s]}',
    EMBEDDINGS: '{"input":[%s]}',
    "/detokenize": '{"tokens":[%s]}',
}


def counted(frame: str) -> int:
    """Values of a body, as they are counted."""
    return 1 + sum(frame.count(mark) for mark in "[{,")


def _of_bodies() -> Iterator[Row]:
    """For each route what BodyLimits has."""
    for path in (*TEXT_FRAMES, *ID_FRAMES):
        limits = BY_PATH[path]
        yield from _of_texts(path, limits) if path in TEXT_FRAMES else _of_ids(path, limits)
        frame = '{"x":' + SLOT + "}"
        yield Row("max_depth", "levels", MAX_DEPTH, path, partial(nested, frame))


def _of_texts(path: str, limits: BodyLimits) -> Iterator[Row]:
    frame = TEXT_FRAMES[path]
    name = "max_tokenize_bytes" if path == "/tokenize" else "max_body_bytes"
    whole = frame % f'"{SLOT}"'
    row = partial(Row, name, "bytes", limits.max_bytes, path, refusal=413)
    yield row(partial(text, whole), what="one word")
    yield row(partial(text, whole, word="a b, "), what="words")
    kind = "input_text" if "responses" in path else "text"
    many, one = frame % f"[{SLOT}]", f'{{"type":"{kind}","text":"a"}}'
    # Two for each, and the comma behind it.
    make = partial(parts, many, one, each=3, base=counted(many) - 1)
    yield Row("max_body_values", "values", limits.max_values, path, make, "parts", grain=3)


def _of_ids(path: str, limits: BodyLimits) -> Iterator[Row]:
    frame = ID_FRAMES[path]
    if path != "/detokenize":
        whole = (frame % SLOT).replace(f"[{SLOT}]", f'"{SLOT}"')
        row = partial(Row, "max_body_bytes", "bytes", limits.max_bytes, path, refusal=413)
        yield row(partial(text, whole), what="one word")
        yield row(partial(text, whole, word="a b, "), what="words")
        lists = frame % SLOT
        # The frame has two, and each of the list one.
        make = partial(parts, lists, f"[{SLOT}]".replace(SLOT, "65"), base=2)
        yield Row("max_body_values", "lists", limits.max_containers, path, make, "lists")
    base = counted(frame) - 1
    most = limits.max_values

    def of_ids(n: int, mark: str) -> bytes:
        return (frame % ids(n - base, mark)).encode()

    yield Row("max_body_token_ids", "values", most, path, of_ids)


def _chat(fields: Callable[[int, str], dict[str, Any]]) -> Body:
    """A chat of one message with a field of size n."""
    messages = [{"role": "user", "content": "Hi"}]
    ordinary = {"messages": messages, "max_tokens": 8, "reasoning_effort": "none"}
    return partial(dumped, lambda n, mark: ordinary | fields(n, mark))


def _of_counts() -> Iterator[Row]:
    """What a body may have so many of."""
    bias, stops = MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
    top, most = MAX_TOP_LOGPROBS, MAX_STOP_STRING_CHARS
    for name, unit, value, fields in (
        ("max_stop_strings", "strings", LIMITS.max_stop_strings, _strings),
        ("max_stop_string_chars", "chars", most, lambda n, mark: {"stop": mark * n}),
        ("max_stop_token_ids", "ids", stops, lambda n, _: {"stop_token_ids": [*range(n)]}),
        ("max_logit_biases", "biases", bias, lambda n, _: {"logit_bias": _biases(n)}),
        ("max_top_logprobs", "tokens", top, _logprobs),
        ("max_tools", "tools", MAX_TOOLS, lambda n, mark: {"tools": _tools(n, mark)}),
        ("max_messages", "messages", LIMITS.max_messages, _messages),
    ):
        yield Row(name, unit, int(value), CHAT, _chat(fields))
    yield Row("max_messages", "messages", LIMITS.max_messages, COUNT, partial(dumped, _messages))
    for name, value, key in (
        ("max_prompts", LIMITS.max_prompts, "prompt"),
        ("max_embedding_inputs", MAX_INPUTS, "input"),
    ):
        path = COMPLETIONS if key == "prompt" else EMBEDDINGS
        frame = f'{{"{key}":[{SLOT}]' + (',"max_tokens":1}' if key == "prompt" else "}")
        yield Row(name, "texts", value, path, partial(parts, frame, f'"Hi {SLOT}"'))
    choices = partial(
        dumped, lambda n, mark: {"prompt": "Hi", "n": n, "seed": ord(mark), "max_tokens": 32}
    )
    yield Row("max_choices", "choices", LIMITS.max_choices, COMPLETIONS, choices)
    head = partial(text, SLOT, less=HEAD_BYTES)
    size = MAX_HEADER_BYTES
    # What does not fit is read with what came with it.
    yield Row("max_header_bytes", "bytes", size, "/health", head, "", size, 431, is_head=True)


HEAD_BYTES = 256
"""Of a request, beside the header that fills it."""


def _strings(n: int, mark: str) -> dict[str, Any]:
    return {"stop": [f"{mark}{number}" for number in range(n)]}


def _biases(n: int) -> dict[str, int]:
    return {str(number): 1 for number in range(n)}


def _logprobs(n: int, mark: str) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": n, "max_tokens": 64, "seed": ord(mark)}


def _tools(n: int, mark: str) -> list[Any]:
    return [{"type": "function", "function": {"name": f"{mark}{number}"}} for number in range(n)]


def _messages(n: int, mark: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": mark}] * n}


FORM_BYTES = 512
"""More than a form has around its text."""


def _of_forms() -> Iterator[Row]:
    """Forms of answers of so many bytes, simple ones and such as take much."""

    def of(make: Callable[[str, int], Any]) -> Body:
        return _chat(lambda n, mark: make(mark, n - FORM_BYTES))

    def schema(value: Any) -> dict[str, Any]:
        form = {"strict": True, "schema": value}
        return {"response_format": {"type": "json_schema", "json_schema": form}}

    for what, make in (
        ("one choice", lambda mark, n: {"guided_choice": [mark * n]}),
        ("choices", lambda mark, n: {"guided_choice": [f"{mark}{i:059}" for i in range(n // 64)]}),
        ("regex, text", lambda mark, n: {"guided_regex": mark * n}),
        ("regex, states", lambda mark, n: {"guided_regex": mark + "(ab|cd)*" * (n // 8)}),
        ("regex, classes", lambda mark, n: {"guided_regex": mark + "[a-z]?" * (n // 6)}),
        ("Lark, text", lambda mark, n: {"guided_grammar": f'start: "{mark * n}"'}),
        ("Lark, rules", lambda mark, n: {"guided_grammar": f'start: "{mark}"' + " | a" * (n // 4)}),
        ("GBNF, lines", lambda mark, n: {"guided_grammar": f'root ::= "{mark}"' + "\n" * (n // 2)}),
        ("GBNF, brackets", lambda mark, n: {"guided_grammar": mark + "[" * n}),
        ("schema, text", lambda mark, n: schema({"enum": [mark * n]})),
        ("schema, names", lambda mark, n: schema({"properties": _names(mark, n)})),
        ("schema, description", lambda mark, n: schema({"description": mark * n})),
    ):
        most, grain = MAX_SPEC_BYTES, 3 * FORM_BYTES
        yield Row("max_spec_bytes", "bytes", most, CHAT, of(make), what, grain)


def _names(mark: str, n: int) -> dict[str, Any]:
    return {f"{mark}{i:05}": {"type": "null"} for i in range(n // 28)}


def rows(context: int) -> list[Row]:
    """All of them. context: what ``max_model_len`` is."""
    made = [*_of_bodies(), *_of_counts(), *_of_forms()]
    for path in (COMPLETIONS, EMBEDDINGS):
        frame = ID_FRAMES[path]
        # One place is the answer's.
        most = context - (path == COMPLETIONS)

        def prompt(n: int, mark: str, frame: str = frame) -> bytes:
            return (frame % ids(n, mark)).encode()

        made.append(Row("engine.max_model_len", "tokens", most, path, prompt))
    return made
