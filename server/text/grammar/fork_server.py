"""The process that judges forms: it forks a child for each, and ends a child that takes too much.

It reads frames from standard input and writes frames to standard output. A frame is four bytes, its
length (big-endian), and so many bytes. The first one in is the text of a tokenizer, which is read
once: every child begins with it. All others are JSON: forms go in, and what becomes of each comes
out as soon as it is known, in any order.

A child is ended by the kernel when its processor time is over, and by this process when it takes
too much memory, or too long. It has one thread, and never imports numpy, MLX or the engine.
"""

import json
import os
import resource
import selectors
import signal
import struct
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import psutil
from llguidance import LLTokenizer

from server.text.grammar.constraint_spec import ConstraintSpec, form_of_json
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.matcher import deep_threads, new_matcher, try_matcher, warm_up
from server.text.grammar.text import TokenizerFacts, grammar_text

# What getrusage counts memory in.
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokenizer that forms are judged for."""

    engine: LLTokenizer
    facts: TokenizerFacts


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a form."""

    grammar: str = ""
    """As the grammar engine takes it."""
    memory_bytes: int = 0
    """The most memory that it took."""
    refusal: str | None = None
    """Why it cannot be enforced; fit for clients."""
    param: str | None = None
    """The request's field that the refusal is of."""

    def to_json(self) -> bytes:
        """Write it for the process that asked."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, text: str) -> "Verdict":
        """Read what ``to_json`` has written."""
        return cls(**json.loads(text))


def judge(form: str, tokens: Tokens, max_mask_s: float) -> Verdict:
    """Compile a form, and follow it over the first tokens of some answers.

    form: of ``form_json``. max_mask_s: processor time that each of the tokens may take.
    """
    spec = form_of_json(form)
    try:
        with deep_threads(1) as thread:
            # Pages that a child only reads count as its own: they are read before.
            thread.submit(warm_up, tokens.engine).result()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grammar = thread.submit(_tried, spec, tokens, max_mask_s).result()
    except GrammarError as error:
        return Verdict(refusal=str(error), param=error.param or spec.param)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Verdict(grammar, grown * MAXRSS_BYTES)


def _tried(spec: ConstraintSpec, tokens: Tokens, max_mask_s: float) -> str:
    grammar = grammar_text(spec, tokens.facts)
    try_matcher(tokens.engine, new_matcher(tokens.engine, grammar), max_mask_s)
    return grammar


LENGTH = struct.Struct(">I")
READ_BYTES = 65536
# Children are looked at so often.
LOOK_S = 0.01
OVER_TIME, OVER_MEMORY, DIED = "over_time", "over_memory", "died"
STARVED = "starved"
"""It got too little of the processor to come to an end."""


@dataclass(slots=True)
class Child:
    """A process that judges one form."""

    number: int
    """The number of the form."""
    pid: int
    most_bytes: int
    """Most bytes of its memory, what it began with included."""
    ends_at: float
    output: bytearray = field(default_factory=bytearray)
    killed_for: str = ""


class ForkServer:
    """Fork children, and read their verdicts."""

    def __init__(self, source: int, sink: int, facts: TokenizerFacts) -> None:
        """source, sink: file descriptors of the frames."""
        self._source = source
        self._sink = sink
        self._facts = facts
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}
        self._tokens: Tokens | None = None
        self._received = bytearray()

    def run(self) -> None:
        """Serve until nobody is left to ask."""
        self._selector.register(self._source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(LOOK_S if self._children else None):
                if key.fd != self._source:
                    self._listen(key.fd)
                elif not self._receive():
                    self._end()
                    return
            for child in self._children.values():
                end_excess(child)

    def _receive(self) -> bool:
        """Take in a request; False when nobody will ask any more."""
        read = os.read(self._source, READ_BYTES)
        self._received += read
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            frame = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            if self._tokens is None:
                self._tokens = _read_tokenizer(frame.decode(), self._facts)
            else:
                self._fork(json.loads(frame), self._tokens)
        return bool(read)

    def _fork(self, request: dict[str, Any], tokens: Tokens) -> None:
        out, into = os.pipe()
        own_bytes = psutil.Process().memory_info().rss
        pid = os.fork() or run_child(request, tokens, into)
        os.close(into)
        self._children[out] = Child(
            request["number"],
            pid,
            own_bytes + request["memory_bytes"],
            time.monotonic() + request["wall_s"],
        )
        self._selector.register(out, selectors.EVENT_READ)

    def _listen(self, out: int) -> None:
        """Take in what a child has written, or that it has ended."""
        child = self._children[out]
        data = os.read(out, READ_BYTES)
        child.output += data
        if data:
            return
        self._selector.unregister(out)
        os.close(out)
        del self._children[out]
        _, status = os.waitpid(child.pid, 0)
        answer: dict[str, Any] = {"number": child.number}
        if child.killed_for or status:
            over_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            answer["ended"] = child.killed_for or (OVER_TIME if over_time else DIED)
        else:
            answer["verdict"] = child.output.decode()
        write_frame(self._sink, json.dumps(answer).encode())

    def _end(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def run_child(request: dict[str, Any], tokens: Tokens, into: int) -> NoReturn:
    """Judge a form, write the verdict, and end the process. into: a file descriptor."""
    # Whose processor time is over is ended by the kernel, whatever it is doing.
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
    os.nice(request["nice"])
    with open(into, "wb") as sink:
        sink.write(judge(request["form"], tokens, request["max_mask_s"]).to_json())
    os._exit(0)


def write_frame(sink: int, content: bytes) -> None:
    left = memoryview(LENGTH.pack(len(content)) + content)
    while left:
        left = left[os.write(sink, left) :]


def _read_tokenizer(text: str, facts: TokenizerFacts) -> Tokens:
    engine = LLTokenizer(text, facts.size, facts.stop_ids)
    warm_up(engine)  # every child has it from the beginning
    return Tokens(engine, facts)


def end_excess(child: Child) -> None:
    if child.killed_for:
        return
    try:
        taken = psutil.Process(child.pid).memory_info().rss
    except psutil.Error:
        return  # it has ended
    if time.monotonic() > child.ends_at:
        child.killed_for = STARVED
    elif taken > child.most_bytes:
        child.killed_for = OVER_MEMORY
    if child.killed_for:
        os.kill(child.pid, signal.SIGKILL)


def main(facts: str) -> None:
    """Serve the process that has started this one. facts: of the tokenizer, as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for that one, which says when to end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ForkServer(sys.stdin.fileno(), sys.stdout.fileno(), TokenizerFacts.of_json(facts)).run()


if __name__ == "__main__":
    main(sys.argv[1])
