"""Closed-loop loads on several servers, which take turns, and their results as rows."""

import asyncio
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.bench.load import Load, LoadResult, run_load, together_per_s
from tests.bench.models import TEMPLATE_TOKENS
from tests.bench.peers import BrokenError, Contestant
from tests.bench.table import Figures, Row

MAX_LOAD_S = 600.0  # a load that takes longer hangs
# Before each load that counts, at as many streams: buffers are allocated, threads awake, and what
# a program compiles for a shape is compiled.
WARM_UP_PROMPT_TOKENS = 64
WARM_UP_ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One load."""

    streams: int
    prompt_tokens: int
    """With the template around it, in a model of the benchmark's; no other server's model counts
    them in the same way."""
    max_tokens: int
    requests_per_stream: int
    time_limit_s: float = MAX_LOAD_S

    @property
    def requests(self) -> int:
        return self.streams * self.requests_per_stream

    def load(self, seed: int) -> Load:
        """Return the load of this case; no other seed gives its prompts."""
        chars = self.prompt_tokens - TEMPLATE_TOKENS  # a letter is a token
        return Load(self.streams, self.requests, chars, self.max_tokens, seed, self.time_limit_s)

    def warm_up(self) -> "Case":
        """Return a short case whose figures are not kept."""
        prompt_tokens = min(self.prompt_tokens, WARM_UP_PROMPT_TOKENS)
        return Case(self.streams, prompt_tokens, WARM_UP_ANSWER_TOKENS, 1, self.time_limit_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one server in one case: one entry per round."""

    tokens_per_s: list[float] = field(default_factory=list)
    """Not a number where the server does not report usage: chunks are no tokens."""
    ttft_ms: list[float] = field(default_factory=list)
    prompt_per_s: list[float] = field(default_factory=list)
    """Tokens of a prompt over the time to the first token."""
    decode_per_s: list[float] = field(default_factory=list)
    """Tokens of one answer after its first."""
    client_share: list[float] = field(default_factory=list)
    lengths: set[tuple[int, int]] = field(default_factory=set)
    """Tokens of prompts and answers, as the server counts them."""
    together_per_s: list[float] = field(default_factory=list)
    """Tokens of all streams while every stream is given some; not a number where streams ask more
    than once."""

    def note(self, result: LoadResult) -> None:
        self.tokens_per_s.append(result.tokens_per_s)
        self.ttft_ms.append(1e3 * statistics.median(result.ttfts_s))
        self.prompt_per_s.append(1e3 * result.answers[0].prompt_tokens / self.ttft_ms[-1])
        self.decode_per_s.append(Figures.of([a.decode_per_s for a in result.answers]).median)
        self.client_share.append(result.client_share)
        self.lengths.update((a.prompt_tokens, a.completion_tokens) for a in result.answers)
        self.together_per_s.append(together_per_s(result.answers))


Seen = dict[tuple[str, Case], Measured]


def nothing_seen() -> Seen:
    return defaultdict(Measured)


def compare_round(
    seen: Seen,
    contestants: Sequence[Contestant],
    cases: Sequence[Case],
    number: int,
    seeds: Iterator[int],
) -> None:
    """Run every case on every server. The order of servers is reversed in every other round."""
    for case in cases:
        for contestant in contestants[:: -1 if number % 2 else 1]:
            run_case(contestant, case.warm_up(), next(seeds))
            seen[contestant.label, case].note(run_case(contestant, case, next(seeds)))


def run_case(contestant: Contestant, case: Case, seed: int) -> LoadResult:
    """Raises BrokenError when the server dies or an answer is not whole."""
    try:
        result = asyncio.run(run_load(contestant.target, case.load(seed)))
    except OSError as error:
        raise BrokenError(f"{contestant.label}: {error}") from error
    contestant.check()
    check_whole(contestant, result, case)
    return result


def check_whole(contestant: Contestant, result: LoadResult, case: Case) -> None:
    """Raise BrokenError unless every request was answered, and in full where the model is ours:
    servers that do different work cannot be compared."""
    label = contestant.label
    if result.errors:
        raise BrokenError(f"{label}: {len(result.errors)} requests failed: {result.errors[0]}")
    if len(result.ttfts_s) != case.requests:
        raise BrokenError(f"{label}: {len(result.ttfts_s)} of {case.requests} answers have a text")
    tokens = [(answer.prompt_tokens, answer.completion_tokens) for answer in result.answers]
    expected = (case.prompt_tokens, case.max_tokens)
    if contestant.has_our_model and tokens != [expected] * case.requests:
        raise BrokenError(
            f"{label}: {case.requests} times {expected} tokens of prompt and answer were expected, "
            f"not {len(tokens)} times {sorted(set(tokens))}"
        )


# --- the table -----------------------------------------------------------------------------------


def compare_rows(
    seen: Seen,
    labels: Sequence[str],
    cases: Sequence[Case],
    figure: str,
    name: str,
    least: Callable[[str, Case], float | None] = lambda *_: None,
) -> list[Row]:
    """Compare the first label with each of the others. figure: a field of Measured. name: of a row,
    in which {case} and {streams} are replaced. least: the ratio that a row should reach, by the
    peer's label and the case."""
    rows = []
    for case in cases:
        streams = "1 stream" if case.streams == 1 else f"{case.streams} streams"
        for peer in labels[1:]:
            ours, theirs = (getattr(seen[label, case], figure) for label in (labels[0], peer))
            silent = any(math.isnan(each) for each in seen[peer, case].tokens_per_s)
            called = f"{peer}, reports no usage" if silent else peer
            unit = "ms" if figure.endswith("_ms") else "tok/s"
            title = name.format(case=case, streams=streams)
            rows.append(Row.of(title, unit, ours, (called, theirs), least(peer, case)))
    return rows


def facts(name: str, seen: Seen, cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Say how much was done, what each server counts, and what the load client took of a core."""
    rounds = max(len(measured.ttft_ms) for measured in seen.values())
    share = max(max(measured.client_share) for measured in seen.values())
    asked = cases[0]
    counted: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for (label, case), measured in seen.items():
        if (case.prompt_tokens, case.max_tokens) == (asked.prompt_tokens, asked.max_tokens):
            counted[label] |= measured.lengths
    differing = [
        f"{label} {sorted(lengths)}"
        for label, lengths in counted.items()
        if lengths != {(asked.prompt_tokens, asked.max_tokens)}
    ]
    note = f"; counted otherwise by {', '.join(differing)}" if differing else ""
    return [
        (
            name,
            f"{rounds} rounds of {asked.requests_per_stream} requests per stream: prompts of "
            f"{asked.prompt_tokens} tokens, answers of {asked.max_tokens}{note}",
        ),
        (f"{name}: load client", f"at most {100 * share:.0f} % of one core"),
    ]
