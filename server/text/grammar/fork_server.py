"""The grammar worker: a process that forks a limited child for each required answer format.

The worker reads frames from standard input and writes frames to standard output. A frame is a
length as four big-endian bytes, and then content of this length. The first frame is the tokenizer's
text. It is read only once, and children inherit the tokenizer. All other frames are JSON. The
worker gets ConstraintSpecs, and sends estimates of their grammars' costs, in any order.

The kernel ends a child that exceeds its processor time. The worker ends a child that exceeds its
memory or wall time. The worker has one thread, and never imports numpy, MLX or the engine."""

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

from server.text.grammar.constraint_spec import ConstraintSpec, spec_of_json
from server.text.grammar.grammar_errors import GrammarError, Relaxation, limit_of
from server.text.grammar.matcher import deep_threads, new_matcher, try_matcher, warm_up
from server.text.grammar.text import TokenizerFacts, grammar_text

# The number of bytes in one unit of ``ru_maxrss``.
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True)
class Tokens:
    """The worker's tokenizer in llguidance's form, with plain facts about it."""

    engine: LLTokenizer
    facts: TokenizerFacts


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """The cost of compiling a grammar, or the reason for refusing the grammar."""

    grammar: str = ""
    """The grammar's text in llguidance's format."""
    memory_bytes: int = 0
    """Peak memory that compiling the grammar takes."""
    refusal: str | None = None
    """A text for clients that says why the grammar cannot be enforced, or None if it can."""
    param: str | None = None
    """The request's field that causes the refusal, or None."""
    not_enforced: list[str] = field(default_factory=list)
    """Keywords of schemas that the grammar does not enforce, with their places."""


def estimate_cost(spec_text: str, tokens: Tokens, max_mask_s: float) -> CostEstimate:
    """Compile a ConstraintSpec in JSON, and try its grammar on the first tokens of some answers.
    Before each token, the search for allowed tokens may take ``max_mask_s`` of processor time."""
    spec = spec_of_json(spec_text)
    try:
        with deep_threads(1) as thread:
            # Reading inherited pages adds to the child's memory, so read them before measuring.
            thread.submit(warm_up, tokens.engine).result()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            trial = thread.submit(_try_grammar, spec, tokens, max_mask_s)
            grammar, not_enforced = trial.result()
    except GrammarError as error:
        return CostEstimate(refusal=str(error), param=error.param or spec.param)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return CostEstimate(grammar, grown * MAXRSS_BYTES, not_enforced=not_enforced)


def _try_grammar(
    spec: ConstraintSpec, tokens: Tokens, max_mask_s: float, *, probes: bool = False
) -> tuple[str, list[str]]:
    """Return a grammar's text, and the keywords of schemas that it does not enforce."""
    relaxation = Relaxation(probes=probes)
    try:
        grammar = grammar_text(spec, tokens.facts, relaxation)
        try_matcher(tokens.engine, new_matcher(tokens.engine, grammar), max_mask_s)
    except GrammarError as error:
        if probes or error.place or limit_of(str(error)):
            raise
        return _try_grammar(spec, tokens, max_mask_s, probes=True)
    return grammar, relaxation.not_enforced


LENGTH = struct.Struct(">I")
READ_BYTES = 65536
# Seconds between two checks of the children's memory and time.
LOOK_S = 0.01
OVER_TIME, OVER_MEMORY, DIED = "over_time", "over_memory", "died"
STARVED = "starved"
"""Says that a child was ended after its wall time because it got too little processor time."""


@dataclass(slots=True)
class Child:
    """A forked process that compiles one ConstraintSpec."""

    number: int
    pid: int
    most_bytes: int
    """Limit of the child's memory, including pages inherited from the worker."""
    ends_at: float
    output: bytearray = field(default_factory=bytearray)
    killed_for: str = ""


class ForkServer:
    """Forks a child for each request, and sends the child's cost estimate."""

    def __init__(self, source: int, sink: int, facts: TokenizerFacts) -> None:
        """Frames are read from the descriptor ``source`` and written to the descriptor ``sink``."""
        self._source = source
        self._sink = sink
        self._facts = facts
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}
        self._tokens: Tokens | None = None
        self._received = bytearray()

    def run(self) -> None:
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
        """Read requests, and fork a child for each. Return False if the input has been closed."""
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
        """Read a child's output. When the output has ended, send it as the request's answer."""
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
            answer["estimate"] = child.output.decode()
        write_frame(self._sink, json.dumps(answer).encode())

    def _end(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def run_child(request: dict[str, Any], tokens: Tokens, into: int) -> NoReturn:
    """Estimate a grammar's cost in a child. Write the estimate to descriptor ``into``, and exit."""
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
    os.nice(request["nice"])
    with open(into, "wb") as sink:
        estimate = estimate_cost(request["spec"], tokens, request["max_mask_s"])
        sink.write(json.dumps(asdict(estimate)).encode())
    os._exit(0)


def write_frame(sink: int, content: bytes) -> None:
    left = memoryview(LENGTH.pack(len(content)) + content)
    while left:
        left = left[os.write(sink, left) :]


def _read_tokenizer(text: str, facts: TokenizerFacts) -> Tokens:
    engine = LLTokenizer(text, facts.size, facts.stop_ids)
    warm_up(engine)  # allocates memory that children inherit
    return Tokens(engine, facts)


def end_excess(child: Child) -> None:
    if child.killed_for:
        return
    try:
        taken = psutil.Process(child.pid).memory_info().rss
    except psutil.Error:
        return  # the child has ended
    if time.monotonic() > child.ends_at:
        child.killed_for = STARVED
    elif taken > child.most_bytes:
        child.killed_for = OVER_MEMORY
    if child.killed_for:
        os.kill(child.pid, signal.SIGKILL)


def main(facts: str) -> None:
    """Run the worker. ``facts`` are TokenizerFacts as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C must only end the parent process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ForkServer(sys.stdin.fileno(), sys.stdout.fileno(), TokenizerFacts(**json.loads(facts))).run()


if __name__ == "__main__":
    main(sys.argv[1])
