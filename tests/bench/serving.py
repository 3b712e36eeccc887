"""Whole servers under a closed-loop load, taking turns."""

import asyncio
import statistics
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.bench.load import Load, LoadResult, run_load
from tests.bench.models import SERVING, TEMPLATE_TOKENS, write_endless_model
from tests.bench.peers import BrokenError, Program, Server, mlx_lm_server, quire
from tests.bench.rounds import Part, Rounds
from tests.bench.table import Row

STREAMS = (1, 8, 16)
TARGETS = {1: 1.0, 8: 1.5, 16: 1.5}
MAX_TOKENS = 128
PROMPT_TOKENS = 86
PROMPT_CHARS = PROMPT_TOKENS - TEMPLATE_TOKENS  # a letter is a token
MAX_LOAD_S = 60.0
# Servers compile, fault pages in and fill their allocators' caches; the peer starts a compiler.
WARM_UP_REQUESTS_PER_STREAM = 2


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one server at one number of streams: one entry per round."""

    tokens_per_s: list[float]
    ttft_ms: list[float]
    client_share: list[float]


Seen = dict[tuple[str, int], Figures]


def run_serving(rounds: Rounds, requests_per_stream: int, threads: int, folder: Path) -> Part:
    """Of both servers. folder: where the model goes.

    Raises BrokenError when a server dies or an answer is not whole.
    """
    model = write_endless_model(folder / "serving", SERVING)
    ours, dense = quire(model, threads), quire(model, threads, "dense")
    peer = mlx_lm_server(model, max(STREAMS))
    seen: Seen = defaultdict(lambda: Figures([], [], []))
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(p, threads)) for p in (ours, peer, dense)]
        seeds = count(1)
        for server in servers:
            warm_up(server, max(STREAMS), next(seeds))
        for number in rounds:
            for streams in STREAMS:
                # The substrates are compared where the cost of one request shows.
                taking_part = servers if streams == 1 else servers[:2]
                # Whoever goes first in one round goes last in the next.
                for server in taking_part[:: -1 if number % 2 else 1]:
                    result = _measure(server, streams, requests_per_stream, next(seeds))
                    _note(seen[server.program.label, streams], result)
    share = max(share for figures in seen.values() for share in figures.client_share)
    done = len(seen[ours.label, 1].tokens_per_s)
    facts = [
        ("serving", f"{done} rounds of {requests_per_stream} requests per stream"),
        ("load client", f"at most {100 * share:.0f} % of one core"),
    ]
    return Part(_rows(seen, ours, peer, dense), facts)


def warm_up(server: Server, streams: int, seed: int) -> None:
    """A load that nobody counts."""
    _measure(server, streams, WARM_UP_REQUESTS_PER_STREAM, seed)


def _measure(server: Server, streams: int, requests_per_stream: int, seed: int) -> LoadResult:
    requests = streams * requests_per_stream
    load = Load(streams, requests, PROMPT_CHARS, MAX_TOKENS, seed, MAX_LOAD_S)
    result = asyncio.run(run_load(server.target, load))
    server.check()
    check_whole(server.program.label, result, requests)
    return result


def check_whole(label: str, result: LoadResult, requests: int) -> None:
    """Raises BrokenError unless all were answered in full: servers that do different work cannot be
    compared."""
    if result.errors:
        raise BrokenError(f"{label}: {len(result.errors)} requests failed: {result.errors[0]}")
    tokens = [(answer.prompt_tokens, answer.completion_tokens) for answer in result.answers]
    expected = (PROMPT_TOKENS, MAX_TOKENS)
    if tokens != [expected] * requests:
        raise BrokenError(
            f"{label}: {requests} times {expected} tokens of prompt and answer were expected, not "
            f"{len(tokens)} times {sorted(set(tokens))}"
        )


def _note(figures: Figures, result: LoadResult) -> None:
    figures.tokens_per_s.append(result.tokens_per_s)
    figures.ttft_ms.append(1e3 * statistics.median(result.ttfts_s))
    figures.client_share.append(result.client_share)


def _rows(seen: Seen, ours: Program, peer: Program, dense: Program) -> list[Row]:
    rows = [
        Row.higher_is_better(
            f"serving, {streams_text(streams)}",
            "tok/s",
            seen[ours.label, streams].tokens_per_s,
            (peer.label, seen[peer.label, streams].tokens_per_s),
            TARGETS[streams],
        )
        for streams in STREAMS
    ]
    rows += [
        Row.lower_is_better(
            f"time to first token, {streams_text(streams)}",
            "ms",
            seen[ours.label, streams].ttft_ms,
            (peer.label, seen[peer.label, streams].ttft_ms),
        )
        for streams in STREAMS
    ]
    one = [seen[program.label, 1].tokens_per_s for program in (ours, dense)]
    beside = Row.higher_is_better(
        f"sparse beside dense, {streams_text(1)}", "tok/s", one[0], (dense.label, one[1])
    )
    return [*rows, beside]


def streams_text(streams: int) -> str:
    """Singular and plural."""
    return "1 stream" if streams == 1 else f"{streams} streams"
