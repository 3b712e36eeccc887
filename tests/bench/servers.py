"""Whole servers on a model of a real one's size: quire beside llama.cpp's and mlx-lm's."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.bench.compare import (
    Case,
    Seen,
    compare_round,
    facts,
    nothing_seen,
    rate_rows,
    streams_text,
    ttft_rows,
)
from tests.bench.contest import Contest
from tests.bench.limits import MEMORY_BYTES, ReadProbe
from tests.bench.models import ModelStore, weight_bytes
from tests.bench.programs import mlx_lm_server, quire
from tests.bench.rounds import Part, Rounds
from tests.bench.table import Row

STREAMS = (1, 4, 8)
PROMPT_TOKENS, ANSWER_TOKENS = 252, 64
MAX_LOAD_S = 300.0
LLAMA_SERVER, MLX_LM = "llama-server", "mlx_lm.server"
LEAST_RATE = {
    LLAMA_SERVER: {1: 1.05, 4: 1.2, 8: 1.2},
    MLX_LM: {1: 5.0, 4: 5.0, 8: 5.0},
}
LEAST_RATE_QUANTISED = {LLAMA_SERVER: {1: 1.0, 4: 1.0, 8: 1.0}}
LEAST_OF_READ_BANDWIDTH = 0.85
READ_PASSES = 3  # a round


def run_servers(
    rounds: Rounds,
    requests_per_stream: int,
    contest: Contest,
    store: ModelStore,
    *,
    quantised: bool = False,
) -> Part:
    """quantised: our server, and nobody else's, has MLX's 4 bits; peers have what their own
    commands say. mlx-lm's server has the same weights in float32, the only ones that it multiplies
    with the fast BLAS, and no part where they are quantised.

    Raises BrokenError when a server dies or an answer is not whole.
    """
    model = store.quantised() if quantised else store.bfloat16()
    wants_mlx_lm = contest.with_mlx_lm and not quantised
    mlx_lm = mlx_lm_server(store.float32(), max(STREAMS)) if wants_mlx_lm else None
    cases = [
        Case(n, PROMPT_TOKENS, ANSWER_TOKENS, requests_per_stream, MAX_LOAD_S) for n in STREAMS
    ]
    seen = nothing_seen()
    read: list[float] = []
    with (
        contest.servers(quire(model, contest.threads), mlx_lm) as servers,
        ReadProbe(MEMORY_BYTES, contest.threads) as probe,
    ):
        labels = [server.label for server in servers]
        for number in rounds:
            read.append(max(probe.bytes_per_s() for _ in range(READ_PASSES)) / 1e9)
            compare_round(seen, servers, cases, number, contest.seeds)
    name = "servers, 4 bits" if quantised else "servers"
    goals = LEAST_RATE_QUANTISED if quantised else LEAST_RATE
    rows = rate_rows(
        name, seen, labels, cases, lambda peer, case: goals.get(peer, {}).get(case.streams)
    )
    rows += ttft_rows(
        seen,
        labels,
        cases,
        lambda peer, _: 1.0 if peer == LLAMA_SERVER and not quantised else None,
        lambda case: f"{PROMPT_TOKENS} tokens, {streams_text(case.streams)}",
    )
    found = facts(name, seen, cases)
    if contest.ours_url is None and store.is_read_whole:
        rates, size = seen[labels[0], cases[0]].decode_per_s, weight_bytes(model)
        rows.append(streaming_row("decode", rates, read, size, LEAST_OF_READ_BANDWIDTH))
        found.append(("of the read limit", _shares_text(seen, labels, cases[0], read, model)))
    return Part(rows, found)


def streaming_row(
    name: str,
    decode_per_s: Sequence[float],
    read: Sequence[float],
    size: int,
    least: float | None,
) -> Row:
    """How fast a decode at batch 1 reads the weights, which it reads once for every token. read:
    GB/s of the probe. size: of the weights, bytes. least: the ratio to reach."""
    streamed = [size * rate / 1e9 for rate in decode_per_s]
    name = f"{name} at 1 stream, weights alone"
    return Row.higher_is_better(name, "GB/s", streamed, ("read probe", read), least)


def _shares_text(
    seen: Seen, labels: Sequence[str], case: Case, read: Sequence[float], model: Path
) -> str:
    """Of everybody, if all had our weights' bytes."""
    size = weight_bytes(model)
    shares = [share_text(its, size, seen[its, case].decode_per_s, read) for its in labels]
    return f"decode at 1 stream times {size / 1e9:.3f} GB: {', '.join(shares)}"


def share_text(label: str, size: int, decode_per_s: Sequence[float], read: Sequence[float]) -> str:
    """Of the read bandwidth. size: of the weights, bytes."""
    rate = statistics.median(decode_per_s)
    share = 100 * size * rate / 1e9 / statistics.median(read)
    return f"{label} {share:.0f} % ({rate:.1f} tok/s)"
