"""What prefixes that many sequences share take, in bytes and in tokens computed."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection

from prometheus_client.parser import text_string_to_metric_families

from tests.bench.load import Exchange
from tests.bench.peers import BrokenError, Server
from tests.bench.programs import HOST
from tests.bench.prompts import (
    MAX_RUN_S,
    SUFFIX_TOKENS,
    Prompts,
    ask,
    check_answer,
    start_answer,
)
from tests.bench.table import Goal, Row

SHARERS = 32
SHARED_TOKENS = 4096
SHARER_TOKENS = 20_000  # more than anybody can read in a run: they leave when it is over
CROWD = 50
CROWD_PREFIX_TOKENS = 1024
# The server's figures are as old as that at most.
SETTLE_S = 0.1
POLL_S = 0.01
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Shared:
    """Of one quire server."""

    copied_bytes: float
    """K and V that hits have copied since its start."""
    one_bytes: float
    """K and V of one sequence with the prefix."""
    all_bytes: float
    """K and V when all have joined it."""
    crowd_tokens: float
    """Prompt tokens that were computed for a crowd that came at once with a new prefix."""

    def rows(self) -> list[Row]:
        """Beside what it would be if nothing were shared."""
        apart = (f"{SHARERS} times one", [SHARERS * self.one_bytes / MIB])
        name = f"K and V of {SHARERS} with a common prefix of {SHARED_TOKENS} tokens"
        together = Row.lower_is_better(name, "MiB", [self.all_bytes / MIB], apart)
        once = CROWD_PREFIX_TOKENS + CROWD * SUFFIX_TOKENS
        alone = ("nothing shared", [float(CROWD * (CROWD_PREFIX_TOKENS + SUFFIX_TOKENS))])
        name = f"prompts computed of {CROWD} at once, prefix of {CROWD_PREFIX_TOKENS}"
        crowd = Row.lower_is_better(name, "tokens", [self.crowd_tokens], alone)
        return [together, crowd.with_goal(Goal.at_most(self.crowd_tokens, once, "tokens"))]

    def facts(self) -> list[tuple[str, str]]:
        """In words."""
        each = (self.all_bytes - self.one_bytes) / (SHARERS - 1)
        return [
            ("copied on hits", f"{self.copied_bytes:.0f} bytes of K and V"),
            (
                "a shared prefix",
                f"{self.one_bytes / MIB:.2f} MiB for one sequence with {SHARED_TOKENS} tokens of "
                f"it, {self.all_bytes / MIB:.2f} MiB for {SHARERS}: {each / MIB:.2f} MiB for each "
                "further one",
            ),
        ]


def measure_sharing(server: Server, prompts: Prompts) -> Shared:
    """Of a quire that has served hits already and has places for all.

    Raises BrokenError when a request fails.
    """
    copied = read_metrics(server)["quire_kv_copied_bytes_total"]
    one, together = asyncio.run(_kv_bytes_of_sharers(server, prompts))
    return Shared(copied, one, together, asyncio.run(_tokens_of_a_crowd(server, prompts)))


def read_metrics(server: Server) -> dict[str, float]:
    """What quire says about itself now: figures without labels by name."""
    time.sleep(SETTLE_S)
    connection = HTTPConnection(HOST, server.port, timeout=MAX_RUN_S)
    try:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    finally:
        connection.close()
    families = text_string_to_metric_families(page)
    return {s.name: s.value for family in families for s in family.samples if not s.labels}


async def _kv_bytes_of_sharers(server: Server, prompts: Prompts) -> tuple[float, float]:
    """Of K and V, while one sequence with the prefix runs, and when all have joined it."""
    family = prompts.family(SHARED_TOKENS, SHARERS)
    readers: list[Exchange] = []
    found: list[float] = []
    try:
        for joining in (family[:1], family[1:]):
            readers += [await start_answer(server, prompt, SHARER_TOKENS) for prompt in joining]
            await _all_read(readers)
            metrics = await asyncio.to_thread(read_metrics, server)
            if metrics["quire_requests_running"] != len(readers):
                raise BrokenError(f"{metrics['quire_requests_running']} sharers are running")
            kinds = ("live", "partial_tail", "mapped_ahead")
            found.append(sum(metrics[f"quire_kv_{kind}_bytes"] for kind in kinds))
    finally:
        for reader in readers:
            reader.abort()
    return found[0], found[1]


async def _all_read(readers: Sequence[Exchange]) -> None:
    async with asyncio.timeout(MAX_RUN_S):
        while not all(reader.parser.text_times_s for reader in readers):
            for reader in readers:
                if reader.parser.done or reader.parser.fault is not None:
                    raise BrokenError(f"a sharer's answer ended early: {reader.parser.error()}")
            await asyncio.sleep(POLL_S)


async def _tokens_of_a_crowd(server: Server, prompts: Prompts) -> float:
    """Prompt tokens that are computed when all ask at once, and nobody has the prefix yet."""
    before = await asyncio.to_thread(read_metrics, server)
    family = prompts.family(CROWD_PREFIX_TOKENS, CROWD)
    for answer in await asyncio.gather(*(ask(server, prompt) for prompt in family)):
        check_answer(server.label, answer, CROWD_PREFIX_TOKENS + SUFFIX_TOKENS)
    after = await asyncio.to_thread(read_metrics, server)
    name = "quire_prompt_tokens_total"
    return after[name] - before[name]
