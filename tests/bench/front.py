"""What the front of several models adds to a request: one of a pair goes to a model directly, the
other one to the same model behind the front."""

import asyncio
import shlex
import shutil
import statistics
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from tests.bench.load import make_prompt, start
from tests.bench.models import SERVING, TEMPLATE_TOKENS, write_endless_model
from tests.bench.peers import BrokenError, Server
from tests.bench.programs import Command, quire
from tests.bench.serving import PROMPT_TOKENS
from tests.bench.table import Goal, Part, Rounds, Row
from tests.clients.servers import QUIRE

PAIRS = 100
WARM_UP_PAIRS = 10
MAX_TOKENS = 2
MAX_RUN_S = 60.0
MAX_ADDED_MS = 2.0


def run_front(rounds: Rounds, threads: int, folder: Path) -> Part:
    """Of both, in pairs. folder: where the models go. Raises BrokenError."""
    model = write_endless_model(folder / "front" / "one", SERVING)
    shutil.copytree(model, folder / "front" / "two")
    # The first one that it lists is the one that is asked.
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
    row = Row.lower_is_better(
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
    exchange = await start(server.target, prompt, MAX_TOKENS)
    answer = await exchange.answer(MAX_RUN_S)
    if answer.error is not None or answer.ttft_s is None:
        raise BrokenError(f"{server.label}: a request failed: {answer.error}")
    return answer.ttft_s
