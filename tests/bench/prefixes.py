"""Time to first token when the beginning of the prompt is cached, on whole servers."""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx

import metal_ext
from tests.bench.models import INTERFERENCE, write_endless_model
from tests.bench.peers import Server
from tests.bench.programs import Program, mlx_lm_server, quire
from tests.bench.prompts import (
    SUFFIX_TOKENS,
    Prompt,
    Prompts,
    ask,
    check_answer,
    check_cached,
    takes_ids,
    whole_blocks,
)
from tests.bench.rounds import Part, Rounds
from tests.bench.sharing import CROWD, measure_sharing
from tests.bench.table import Goal, Row
from tests.metal_ext.layers import PagedLayer, normal

PREFIX_TOKENS = (256, 1024, 4096)
WARM_REQUESTS = 3  # with one prefix
LARGEST_OVER_SMALLEST = 1.5
MAX_NUM_SEQS = 64
ATTENTIONS = 30
PAGE_BYTES = 65536
assert MAX_NUM_SEQS >= CROWD


@dataclass(frozen=True, slots=True)
class Ttfts:
    """Of one server and one length: one figure per round, milliseconds."""

    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)


Seen = dict[tuple[str, int], Ttfts]


def run_prefixes(rounds: Rounds, threads: int, folder: Path) -> Part:
    """Of both servers. folder: where the model goes.

    Raises BrokenError when a server dies, or does not share what it should.
    """
    model = write_endless_model(folder / "prefixes", INTERFERENCE)
    ours, peer = _sharing_quire(model, threads), mlx_lm_server(model, MAX_NUM_SEQS)
    prompts = Prompts(model)
    encoding_ms = {length: prompts.encoding_ms(length) for length in PREFIX_TOKENS}
    seen: Seen = defaultdict(Ttfts)
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(p, threads)) for p in (ours, peer)]
        for server in servers:
            for length in PREFIX_TOKENS:
                _measure(server, prompts, length, Ttfts())  # nobody counts it
        for number in rounds:
            for length in PREFIX_TOKENS:
                for server in servers[:: -1 if number % 2 else 1]:
                    _measure(server, prompts, length, seen[server.label, length])
        shared = measure_sharing(servers[0], prompts)
    for length in PREFIX_TOKENS:
        theirs = seen[peer.label, length]
        for times in (theirs.cold, theirs.warm):
            times[:] = [ms - encoding_ms[length] for ms in times]
    facts = [
        ("cached prefixes", _rounds_text(len(seen[ours.label, PREFIX_TOKENS[0]].warm))),
        ("encoding", _encoding_text(encoding_ms)),
        ("attention's part", _attention_text(seen, ours, attention_ms(threads))),
    ]
    return Part([*_ttft_rows(seen, ours, peer), *shared.rows()], [*facts, *shared.facts()])


def _sharing_quire(model: Path, threads: int) -> Program:
    program = quire(model, threads)
    return replace(program, arguments=(*program.arguments, "--max-num-seqs", str(MAX_NUM_SEQS)))


def _measure(server: Server, prompts: Prompts, length: int, ttfts: Ttfts) -> None:
    """One prefix: first nobody has it, then the cache."""
    first, *others = prompts.family(length, 1 + WARM_REQUESTS)
    ttfts.cold.append(_ttft_ms(server, first, length, cached_tokens=0))
    warm = [_ttft_ms(server, one, length, cached_tokens=length) for one in others]
    ttfts.warm.append(statistics.median(warm))


def _ttft_ms(server: Server, prompt: Prompt, length: int, *, cached_tokens: int) -> float:
    """Milliseconds to the first text."""
    answer = asyncio.run(ask(server, prompt))
    server.check()
    check_answer(server.label, answer, length + SUFFIX_TOKENS)
    check_cached(server.label, answer, cached_tokens, exactly=takes_ids(server))
    assert answer.ttft_s is not None
    return 1e3 * answer.ttft_s


def attention_ms(threads: int) -> dict[int, float]:
    """What attention of the new tokens over each prefix takes in all layers: medians of turns.

    As after a hit: every layer has K and V of its own, behind addresses that are mapped anew.
    """
    spec, workers = INTERFERENCE, metal_ext.CpuWorkers(threads)
    queries = normal((SUFFIX_TOKENS, spec.num_attention_heads, spec.head_dim), mx.float32)
    mx.eval(queries)
    caches = {length: _layers(length, workers) for length in PREFIX_TOKENS}
    seen: dict[int, list[float]] = {length: [] for length in PREFIX_TOKENS}
    for _ in range(ATTENTIONS):
        for length, layers in caches.items():
            tables = [_mapped_anew(layer, length) for layer in layers]
            started_s = time.perf_counter()
            for layer, rows in zip(layers, tables, strict=True):
                mx.eval(
                    metal_ext.chunk_attention(
                        layer.token,
                        queries,
                        rows,
                        0,
                        layer.layer,
                        spec.num_key_value_heads,
                        spec.head_dim**-0.5,
                        workers,
                    )
                )
            seen[length].append(1e3 * (time.perf_counter() - started_s))
    return {length: statistics.median(times) for length, times in seen.items()}


def _layers(prefix_tokens: int, workers: metal_ext.CpuWorkers) -> list[PagedLayer]:
    return [
        PagedLayer(
            (prefix_tokens + SUFFIX_TOKENS,),
            kv_heads=INTERFERENCE.num_key_value_heads,
            head_dim=INTERFERENCE.head_dim,
            workers=workers,
            page_bytes=PAGE_BYTES,
        ).fill()
        for _ in range(INTERFERENCE.num_hidden_layers)
    ]


def _mapped_anew(layer: PagedLayer, prefix_tokens: int) -> metal_ext.RowTable:
    addresses = metal_ext.AddressRange.sparse(layer.shape.geometry())
    addresses.map(layer.heap, 0, 0, layer.shape.blocks_per_range, writable=False)
    return metal_ext.RowTable([(addresses, prefix_tokens, SUFFIX_TOKENS)])


# --- the table -----------------------------------------------------------------------------------


def _ttft_rows(seen: Seen, ours: Program, peer: Program) -> list[Row]:
    rows = []
    for length in PREFIX_TOKENS:
        own, other = seen[ours.label, length], seen[peer.label, length]
        for name, figures in (
            (f"time to first token, {length} tokens cached", (own.warm, other.warm)),
            (f"time to first token, {length} tokens not cached", (own.cold, other.cold)),
        ):
            rows.append(Row.lower_is_better(name, "ms", figures[0], (peer.label, figures[1])))
    return [*rows, _flatness_row(seen, ours, peer)]


def _flatness_row(seen: Seen, ours: Program, peer: Program) -> Row:
    own, other = (flatness([seen[p.label, n].warm for n in PREFIX_TOKENS]) for p in (ours, peer))
    name = "largest of the three with a cached prefix"
    row = Row.lower_is_better(name, "times the smallest", [own], (peer.label, [other]))
    return row.with_goal(Goal(f"<= {LARGEST_OVER_SMALLEST:g}", own <= LARGEST_OVER_SMALLEST))


def flatness(figures: Sequence[Sequence[float]]) -> float:
    """How often the smallest of the medians goes into the largest."""
    medians = [statistics.median(one) for one in figures]
    return max(medians) / min(medians)


def _rounds_text(done: int) -> str:
    return (
        f"{done} rounds, {WARM_REQUESTS} requests with {SUFFIX_TOKENS} new tokens after each cold "
        f"one; quire's block: {whole_blocks(64)} tokens"
    )


def _encoding_text(encoding_ms: Mapping[int, float]) -> str:
    longest_ms = encoding_ms[PREFIX_TOKENS[-1]]
    return (
        "quire is given token ids; mlx_lm.server takes text only, and what its tokenizer takes "
        f"here is subtracted: {longest_ms:.2f} ms of the longest"
    )


def _attention_text(seen: Seen, ours: Program, attention: Mapping[int, float]) -> str:
    without = [
        [ms - attention[length] for ms in seen[ours.label, length].warm] for length in PREFIX_TOKENS
    ]
    shortest, longest = PREFIX_TOKENS[0], PREFIX_TOKENS[-1]
    return (
        f"of {SUFFIX_TOKENS} tokens in {INTERFERENCE.num_hidden_layers} layers, alone in a "
        f"process: {attention[shortest]:.1f} ms after {shortest} tokens, {attention[longest]:.1f} "
        f"ms after {longest}; without it the largest is {flatness(without):.2f} times the smallest"
    )
