"""Whole servers around a model so small that what is measured is the server."""

from pathlib import Path

from tests.bench.compare import (
    Case,
    compare_round,
    facts,
    nothing_seen,
    rate_rows,
    run_case,
    streams_text,
    ttft_rows,
)
from tests.bench.models import SERVING, write_endless_model
from tests.bench.peers import Contest
from tests.bench.programs import mlx_lm_server, quire
from tests.bench.table import Part, Rounds

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
    rows = rate_rows("serving", seen, labels, cases, least_ratio)
    rows += ttft_rows(seen, labels, cases, lambda *_: None, lambda case: streams_text(case.streams))
    return Part(rows, facts("serving", seen, cases))


def cases_of(requests_per_stream: int) -> list[Case]:
    """By the number of streams."""
    return [Case(n, PROMPT_TOKENS, MAX_TOKENS, requests_per_stream) for n in STREAMS]


def least_ratio(peer: str, case: Case) -> float | None:
    """What is promised beside mlx-lm's server; other peers have no target here."""
    return TARGETS[case.streams] if peer == MLX_LM else None
