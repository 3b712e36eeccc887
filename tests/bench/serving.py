"""Whole servers around a model so small that the server itself is measured."""

import asyncio
import shlex
import shutil
import statistics
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from tests.bench.compare import Case, compare_round, compare_rows, facts, nothing_seen, run_case
from tests.bench.load import make_prompt, start
from tests.bench.models import SERVING, TEMPLATE_TOKENS, write_endless_model
from tests.bench.peers import BrokenError, Command, Contest, Server, mlx_lm_server, quire
from tests.bench.table import Goal, Part, Rounds, Row
from tests.clients.servers import QUIRE

STREAMS = (1, 8, 16)
MLX_LM = "mlx_lm.server"
TARGETS = {1: 1.0, 8: 2.0, 16: 2.0}
MAX_TOKENS = 128
PROMPT_TOKENS = 86
# Servers compile, fault pages in and fill their allocators' caches; the peer starts a compiler.
WARM_UP_REQUESTS_PER_STREAM = 2


def run_serving(rounds: Rounds, requests_per_stream: int, folder: Path, contest: Contest) -> Part:
    """folder: where the model goes.

    Raises BrokenError when a server dies or an answer is not whole.
    """
    model = write_endless_model(folder / "serving", SERVING)
    cases = cases_of(requests_per_stream)
    seen = nothing_seen()
    ours, mlx_lm = quire(model, contest.threads), mlx_lm_server(model, max(STREAMS))
    with contest.servers(ours, mlx_lm) as servers:
        labels = [server.label for server in servers]
        for server in servers:
            warm_up = Case(max(STREAMS), PROMPT_TOKENS, MAX_TOKENS, WARM_UP_REQUESTS_PER_STREAM)
            run_case(server, warm_up, next(contest.seeds))
        for number in rounds:
            compare_round(seen, servers, cases, number, contest.seeds)
    rows = compare_rows(seen, labels, cases, "tokens_per_s", "serving, {streams}", least_ratio)
    rows += compare_rows(seen, labels, cases, "ttft_ms", "time to first token, {streams}")
    return Part(rows, facts("serving", seen, cases))


def cases_of(requests_per_stream: int) -> list[Case]:
    return [Case(n, PROMPT_TOKENS, MAX_TOKENS, requests_per_stream) for n in STREAMS]


def least_ratio(peer: str, case: Case) -> float | None:
    """Return the ratio that is promised beside mlx-lm's server; other peers have none."""
    return TARGETS[case.streams] if peer == MLX_LM else None


PAIRS = 100
WARM_UP_PAIRS = 10
FRONT_MAX_TOKENS = 2
MAX_RUN_S = 60.0
MAX_ADDED_MS = 2.0


def run_front(rounds: Rounds, threads: int, folder: Path) -> Part:
    """Ask a model directly and behind the front of several models, in pairs. folder: where the
    models go. Raises BrokenError."""
    model = write_endless_model(folder / "front" / "one", SERVING)
    shutil.copytree(model, folder / "front" / "two")
    # The load goes to the first model of its list.
    arguments = ["serve", str(model), str(folder / "front" / "two"), "--threads", str(threads)]
    line = shlex.join([QUIRE, *arguments])
    several = Command("several models", f"{line} --host 127.0.0.1 --port {{port}}")
    direct_ms: list[float] = []
    front_ms: list[float] = []
    added_ms: list[float] = []
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(its, threads)) for its in (quire(model, threads), several)
        ]
        seeds = count(1)
        _pairs(servers, WARM_UP_PAIRS, seeds)
        for _ in rounds:
            direct, front = _pairs(servers, PAIRS, seeds)
            direct_ms.append(statistics.median(direct))
            front_ms.append(statistics.median(front))
            added_ms.append(statistics.median(b - a for a, b in zip(direct, front, strict=True)))
    row = Row.of(
        "first token behind the front of several models", "ms", front_ms, ("direct", direct_ms)
    )
    added = statistics.median(added_ms)
    fact = (
        f"{added:.2f} ms added to the first token (medians of {PAIRS} pairs, {len(added_ms)} "
        f"rounds: {min(added_ms):.2f} to {max(added_ms):.2f}); goal: at most {MAX_ADDED_MS:g}"
    )
    limit = statistics.median(direct_ms) + MAX_ADDED_MS
    return Part([row.with_goal(Goal.at_most(row.quire, limit, "ms"))], [("front", fact)])


def _pairs(servers: list[Server], pairs: int, seeds: "count[int]") -> list[list[float]]:
    """Return the times to the first token of each server, in milliseconds."""
    times: list[list[float]] = [[] for _ in servers]
    for number in range(pairs):
        order = list(zip(servers, times, strict=True))
        for server, its in order[:: -1 if number % 2 else 1]:
            prompt = make_prompt(next(seeds), 0, PROMPT_TOKENS - TEMPLATE_TOKENS)
            its.append(1e3 * asyncio.run(_first_token_s(server, prompt)))
    return times


async def _first_token_s(server: Server, prompt: str) -> float:
    exchange = await start(server.target, prompt, FRONT_MAX_TOKENS)
    answer = await exchange.answer(MAX_RUN_S)
    if answer.error is not None or answer.ttft_s is None:
        raise BrokenError(f"{server.label}: a request failed: {answer.error}")
    return answer.ttft_s
