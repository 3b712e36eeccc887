"""A closed-loop load on any server that speaks OpenAI's chat completions.

Each stream sends its next request when its last one has ended. Tokens are counted by the server's
own ``usage``: a chunk may carry several.
"""

import asyncio
import json
import math
import random
import re
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

END_OF_HEAD = b"\r\n\r\n"
# Text of a delta that is not empty, as compact JSON or with a space. Quotes inside a text are
# escaped, so that no text can look like a key. One match counts, however many keys an event has.
TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content)": ?"(?!")')
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
PROMPT_TOKENS = re.compile(rb'"prompt_tokens": ?(\d+)')
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
# At the beginning of a line, where no text can stand: a text's line ends are escaped.
ERROR = re.compile(rb'^data: ?\{"error"', re.MULTILINE)
DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
MAX_QUOTED_BYTES = 300


class Unchunker:
    """HTTP/1.1's chunked framing, taken off: RFC 9112, section 7.1."""

    def __init__(self) -> None:
        self._line = b""
        self._left = 0  # bytes of the current chunk, with its line end

    def feed(self, data: bytes) -> bytes:
        parts: list[bytes] = []
        while data:
            if self._left > 0:
                piece, data = data[: self._left], data[self._left :]
                # The last two of a chunk's bytes are its line end.
                parts.append(piece[: max(0, self._left - 2)])
                self._left -= len(piece)
                continue
            line, end, data = (self._line + data).partition(b"\r\n")
            self._line = b"" if end else line
            if not end:
                break
            size = int(line.partition(b";")[0] or b"0", 16)
            self._left = size + 2 if size else 0
        return b"".join(parts)


@dataclass(slots=True)
class ReplyParser:
    """A streamed answer that is parsed as it comes in. Times are those of the reads that brought
    events."""

    text_times_s: list[float] = field(default_factory=list)
    """One for each read that brought text."""
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    done: bool = False
    """Whether the answer ended as it should."""
    fault: str | None = None
    _head: bytes = b""
    _in_body: bool = False
    _unchunker: Unchunker | None = None
    _rest: bytes = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse the bytes of one read. Nothing is parsed after a fault."""
        if self.fault is not None:
            return
        if not self._in_body:
            head, end, data = (self._head + data).partition(END_OF_HEAD)
            self._head = head
            if not end:
                return
            self._begin(head)
        try:
            if self._unchunker is not None:
                data = self._unchunker.feed(data)
        except ValueError as error:
            self.fault = f"no HTTP: {error}"
            return
        self._take(self._rest + data, now_s)

    def error(self) -> str | None:
        """Return why the connection's end was not the answer's; None when all is well."""
        if self.fault is not None:
            return self.fault
        if self.status != 200:
            body = self._rest[:MAX_QUOTED_BYTES].decode(errors="replace")
            return f"status {self.status}: {body}" if self.status else "no answer"
        return None if self.done else "the answer broke off"

    def _begin(self, head: bytes) -> None:
        self._in_body = True
        status = STATUS.match(head)
        if status is None:
            self.fault = f"no HTTP: {head[:MAX_QUOTED_BYTES].decode(errors='replace')!r}"
            return
        self.status = int(status[1])
        if b"transfer-encoding: chunked" in head.lower().split(b"\r\n"):
            self._unchunker = Unchunker()

    def _take(self, body: bytes, now_s: float) -> None:
        """Parse the events that are whole; an event ends with an empty line."""
        end = max(body.rfind(b"\n\n"), body.rfind(b"\n\r\n"))
        if end < 0 or self.status != 200:
            self._rest = body
            return
        events, self._rest = body[:end], body[end:]
        if TEXT.search(events):
            self.text_times_s.append(now_s)
        if completion := COMPLETION_TOKENS.search(events):
            self.completion_tokens = int(completion[1])
            if prompt := PROMPT_TOKENS.search(events):
                self.prompt_tokens = int(prompt[1])
        if ERROR.search(events):
            self.fault = events[-MAX_QUOTED_BYTES:].decode(errors="replace")
        if DONE.search(events):
            self.done = True


CONNECT_TIMEOUT_S = 10.0
# Enough for the requests of a load that is out of time to be seen as late, not as lost.
GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and its name of the model."""

    host: str
    port: int
    path: str
    model: str

    @classmethod
    def of(cls, base_url: str, model: str) -> "Target":
        """base_url: as for OpenAI's SDKs, "http://127.0.0.1:8000/v1"."""
        url = urlsplit(base_url)
        if url.scheme != "http" or url.hostname is None:
            raise ValueError(f"{base_url!r}: the load client speaks plain http only")
        return cls(url.hostname, url.port or 80, url.path.rstrip("/"), model)

    def request(self, prompt: str, max_tokens: int) -> bytes:
        """Return a chat request for the likeliest answer. It has no seed, as some servers do not
        batch requests with one, and a connection of its own."""
        fields = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(fields).encode()
        head = (
            f"POST {self.path}/chat/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request. Times are ``time.perf_counter`` seconds."""

    started_s: float
    ended_s: float
    text_times_s: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    error: str | None

    @property
    def ttft_s(self) -> float | None:
        """Return the time to the first text; None when there was none."""
        return self.text_times_s[0] - self.started_s if self.text_times_s else None

    @property
    def decode_per_s(self) -> float:
        """Return tokens after the first one over the time between first and last text; not a number
        where there is no such time, or no count."""
        if self.completion_tokens == 0 or len(self.text_times_s) < 2:
            return math.nan
        return (self.completion_tokens - 1) / (self.text_times_s[-1] - self.text_times_s[0])


class Exchange(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, started_s: float) -> None:
        """started_s: before the connection was opened, as a full server lets that wait too."""
        self.parser = ReplyParser()
        self.started_s = started_s
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Give a read to the parser. The end of the answer, or a fault, ends the exchange."""
        self.parser.feed(data, time.perf_counter())
        if self.parser.done or self.parser.fault is not None:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(time.perf_counter())

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def answer(self, timeout_s: float) -> Answer:
        """Wait until the connection ends, or until the time is up."""
        error: str | None = None
        try:
            ended_s = await asyncio.wait_for(asyncio.shield(self._closed), timeout_s)
        except TimeoutError:
            ended_s, error = time.perf_counter(), f"no end within {timeout_s:.0f} s"
            self.abort()
        parser = self.parser
        return Answer(
            self.started_s,
            ended_s,
            tuple(parser.text_times_s),
            parser.prompt_tokens,
            parser.completion_tokens,
            error or parser.error(),
        )


async def start(target: Target, prompt: str, max_tokens: int) -> Exchange:
    """Send a chat request. Raises OSError where nothing listens."""
    loop = asyncio.get_running_loop()
    request, started_s = target.request(prompt, max_tokens), time.perf_counter()
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        _, exchange = await loop.create_connection(
            lambda: Exchange(request, started_s), target.host, target.port
        )
    return exchange


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    requests: int
    """In all streams together."""
    prompt_chars: int
    max_tokens: int
    seed: int
    """Two loads of different seeds share no prompt, so that no prefix cache can answer."""
    time_limit_s: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    answers: list[Answer]
    client_cpu_s: float

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]

    @property
    def seconds(self) -> float:
        """Return the time from the first request to the last end."""
        started = min(answer.started_s for answer in self.answers)
        return max(answer.ended_s for answer in self.answers) - started

    @property
    def tokens_per_s(self) -> float:
        """Return generated tokens of all streams; not a number when a text came without a count."""
        if any(a.text_times_s and a.completion_tokens == 0 for a in self.answers):
            return math.nan
        return sum(answer.completion_tokens for answer in self.answers) / self.seconds

    @property
    def client_share(self) -> float:
        """Return the share of one core that the client itself used."""
        return self.client_cpu_s / self.seconds

    @property
    def ttfts_s(self) -> list[float]:
        return [answer.ttft_s for answer in self.answers if answer.ttft_s is not None]


def together_per_s(answers: Sequence[Answer]) -> float:
    """Return the tokens of all streams per second while every stream gets some: from the last first
    text to the first last one. A text counts as the tokens that usage has for each text after the
    first. Not a number where there is no such time, or no count."""
    if any(a.completion_tokens == 0 or len(a.text_times_s) < 2 for a in answers):
        return math.nan
    begun_s = max(a.text_times_s[0] for a in answers)
    ended_s = min(a.text_times_s[-1] for a in answers)
    if ended_s <= begun_s:
        return math.nan
    tokens = 0.0
    for one in answers:
        texts = sum(begun_s < time_s <= ended_s for time_s in one.text_times_s)
        tokens += texts * (one.completion_tokens - 1) / (len(one.text_times_s) - 1)
    return tokens / (ended_s - begun_s)


def make_prompt(seed: int, index: int, chars: int) -> str:
    """Return random words that no other seed and index give; they differ from the first letter
    on."""
    draw = random.Random(f"{seed} {index}")
    letters = draw.choices(string.ascii_lowercase, k=chars)
    for place in range(7, chars - 1, 8):
        letters[place] = " "
    return "".join(letters)


async def run_load(target: Target, load: Load) -> LoadResult:
    """Run a load to its end. Failed requests are among the answers; raises OSError where nothing
    listens."""
    deadline_s = time.perf_counter() + load.time_limit_s
    prompts = (make_prompt(load.seed, i, load.prompt_chars) for i in range(load.requests))
    before_s = time.process_time()
    streams = [_stream(target, prompts, load.max_tokens, deadline_s) for _ in range(load.streams)]
    answers = [answer for part in await asyncio.gather(*streams) for answer in part]
    return LoadResult(answers, time.process_time() - before_s)


async def _stream(
    target: Target, prompts: Iterator[str], max_tokens: int, deadline_s: float
) -> list[Answer]:
    """Send prompts that no other stream has taken, one after the other."""
    answers: list[Answer] = []
    for prompt in prompts:
        left_s = deadline_s - time.perf_counter()
        if left_s <= 0:
            break
        exchange = await start(target, prompt, max_tokens)
        answers.append(await exchange.answer(left_s + GRACE_S))
    return answers
