"""One streamed answer, read from the bytes of its connection.

Client and server share the machine's cores, so what is not needed is not parsed: no JSON is decoded
while an answer streams, only a few fixed strings are looked for. httpx takes 0.1 ms of a processor
more for each read, most of one core at the rates that are measured here.
"""

import re
from dataclasses import dataclass, field

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
        self._left = 0  # of the current chunk, with the line end that follows it

    def feed(self, data: bytes) -> bytes:
        """What the bytes add to the body."""
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
    """A streamed answer as it comes in. Times are those of the reads that brought the events."""

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
        """Takes in what one read brought. Nothing more is taken in after a fault."""
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
        """Why the connection's end was not the answer's; None when all is well."""
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
        """Looks at the events that are whole; an event ends with an empty line."""
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
