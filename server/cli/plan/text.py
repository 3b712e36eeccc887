"""The capacity report as plain text: one table per question, with a sentence that explains it."""

import textwrap
from collections.abc import Iterator

from engine.planning.capacity import CapacityReport
from engine.planning.memory import BF16, Packing, cell_bytes, kv_bytes_per_token
from server.cli.sentences import table

COLUMNS = 100
GIB = 1024**3
KIB = 1024
MICROSECONDS = 1e6
INDENT = "  "
# The mean lengths in the table of blocks; the picture has all of them.
SHOWN_MEANS = (1024, 4096)
# Lengths that are no multiples of a block: sequences end anywhere.
SHOWN_LENGTHS = (100, 300, 1000, 3000, 10000, 30000)


def report_lines(report: CapacityReport) -> Iterator[str]:
    for part in (_head, _by_context, _quantisation, _committed, _blocks, _fits, _crowd, _advice):
        yield from part(report)
        yield ""


def gib(amount: float) -> str:
    """Write bytes in GiB: two decimals, or four where two would say next to nothing."""
    return f"{amount / GIB:.4f}" if 0 < amount < GIB / 10 else f"{amount / GIB:.2f}"


def prose(text: str, indent: str = "") -> Iterator[str]:
    """Yield the words in lines that a terminal holds."""
    yield from textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def note(text: str) -> Iterator[str]:
    """Yield the explanation of a table, under its heading."""
    yield from prose(text, INDENT)


def _head(report: CapacityReport) -> Iterator[str]:
    shape, device, demand = report.shape, report.device, report.demand
    yield f"Capacity on {device.name} with {gib(report.memory_bytes)} GiB"
    of_gpu = f"Its GPU may use {gib(demand.machine_bytes)} GiB of these. " if device.on_gpu else ""
    yield from note(
        f"{of_gpu}{shape.parameters / 1e6:.0f} million parameters; the device reads "
        f"{device.bytes_per_s / 1e9:.0f} GB/s and does {device.ops_per_s / 1e12:.1f} Tops/s, at "
        f"its peak. {gib(demand.usable_bytes - demand.fixed_bytes)} GiB are there for weights, K "
        f"and V: {gib(demand.headroom_bytes)} are left to other programs, activations take "
        f"{gib(demand.activation_bytes)}, MLX's cache {gib(demand.mlx_cache_bytes)}, "
        f"compiled grammars {gib(demand.grammar_bytes)}."
    )
    if report.problem is not None:
        yield from note(f"This is what would fit, and is not served there: {report.problem}.")


def _by_context(report: CapacityReport) -> Iterator[str]:
    first = report.by_context[0]
    yield f"Weights against K and V by context, in GiB, both {first.kv.name}"
    per_token = kv_bytes_per_token(report.shape, first.kv)
    states = bool(first.states_bytes)
    beside = (
        f" Beside that a sequence may have {gib(first.states_bytes)} GiB, however long it is: the "
        f"states of its recurrent layers, in cells of {gib(cell_bytes(report.shape))}."
    )
    yield from note(f"Every token of context costs {per_token / KIB:g} KiB.{beside * states}")
    known = report.shape.max_position_embeddings
    rows = [
        (
            f"{r.context}" + (" *" if r.context > known else ""),
            gib(r.weights_bytes),
            gib(r.kv_bytes),
            *([gib(r.states_bytes)] if states else []),
            gib(r.total_bytes),
            f"{r.kv_bytes / r.total_bytes:.0%}",
        )
        for r in report.by_context
    ]
    kept = ("K and V", "states") if states else ("K and V",)
    yield from table(("context", "weights", *kept, "resident", "K and V share"), rows, INDENT)
    if report.by_context[-1].context > known:
        yield from note(f"* beyond the {known} positions that the model knows")


def _quantisation(report: CapacityReport) -> Iterator[str]:
    yield f"What quantisation buys at {report.context} tokens, in GiB"
    yield from note(
        "q8 and q4 are MLX's groups of 64: 8.5 and 4.5 bits per number. Room is what the weights "
        "leave to K and V, contexts are the sequences of full length that it holds. quire keeps K "
        "and V in bf16 or float32: rows ending in /q8 or /q4 are hypothetical."
    )
    first = report.steps[0].resident
    rows = [
        (
            pair_name(step.resident.weights, step.resident.kv),
            gib(step.resident.weights_bytes),
            gib(step.resident.kv_bytes),
            gib(step.resident.total_bytes),
            gib(first.total_bytes - step.resident.total_bytes),
            gib(step.room.kv_bytes),
            str(step.contexts),
        )
        for step in report.steps
    ]
    head = ("weights/KV", "weights", "K and V", "resident", "saved", "room", "contexts")
    yield from table(head, rows, INDENT)


def _committed(report: CapacityReport) -> Iterator[str]:
    yield "What one sequence is charged by its length, in GiB"
    yield from note("Used is what its tokens fill; the rest is committed and empty.")
    lengths = [tokens for tokens in SHOWN_LENGTHS if tokens < report.context] + [report.context]
    per_token = kv_bytes_per_token(report.shape, BF16)
    rows = [
        (
            str(tokens),
            gib(tokens * per_token),
            *(gib(a.committed_bytes(tokens)) for a in report.allocations),
        )
        for tokens in lengths
    ]
    yield from table(("tokens", "used", *(a.name for a in report.allocations)), rows, INDENT)


def _blocks(report: CapacityReport) -> Iterator[str]:
    yield "What a page size costs"
    yield from note(
        "Waste is the empty end of a sequence's last block. Mappings are those of one sequence: "
        "if its blocks follow each other in memory, to if they lie anywhere. Time is spent on "
        "mapping, for each new token of a sequence."
    )
    rows = [
        (
            f"{a.page_bytes // KIB} KiB",
            str(a.tokens_per_block),
            str(a.mean_tokens),
            f"{a.waste:.1%}",
            f"{a.mappings_merged} to {a.mappings_scattered}",
            f"{a.table_bytes / KIB:.1f} KiB",
            f"{a.mapping_s_per_token * MICROSECONDS:.1f} us",
        )
        for a in report.blocks
        if a.mean_tokens in SHOWN_MEANS
    ]
    head = ("page", "tokens/block", "mean length", "waste", "mappings", "page table", "time")
    yield from table(head, rows, INDENT)


def _fits(report: CapacityReport) -> Iterator[str]:
    yield "How many sequences fit"
    yield from note(
        f"At {report.context} tokens each, and at {report.mean_tokens} each (the mean of the "
        "crowd below) by how their K and V are allocated. Tokens are those of all sequences "
        "together; weights are refused that leave too few for a short conversation."
    )
    rows = [
        (
            fit.weights.name,
            gib(fit.room.kv_bytes),
            str(fit.tokens or "refused"),
            str(fit.whole_context[-1]),
            *map(str, fit.mean_length),
        )
        for fit in report.fits
    ]
    names = [f"{report.mean_tokens}: {a.name}" for a in report.allocations]
    yield from table(
        ("weights", "room (GiB)", "tokens", f"{report.context} each", *names), rows, INDENT
    )


def _crowd(report: CapacityReport) -> Iterator[str]:
    crowd = report.crowd
    if crowd is None:
        yield from prose(
            f"No crowd was simulated: {gib(report.memory_bytes)} GiB do not hold the "
            f"weights and one sequence of {report.context} tokens."
        )
        return
    yield f"A crowd of {crowd.requests} requests, {crowd.weights.name} weights"
    yield from note(
        f"They come almost at once, {report.mean_tokens} tokens long on average, to quire's own "
        "scheduler on simulated time. Running counts those that have memory, on average while "
        "others wait. Times are at the device's peak rates: a lower bound."
    )
    rows = [
        (
            allocation.name,
            f"{outcome.mean_running:.1f}",
            str(outcome.peak_running),
            f"{gib(outcome.peak_committed_bytes)} GiB",
            str(outcome.preemptions),
            f"{outcome.mean_wait_s:.0f} s",
            f"{outcome.generated_tokens / outcome.seconds:.0f}",
        )
        for allocation, outcome in zip(report.allocations, crowd.reports, strict=True)
    ]
    head = (
        "allocation",
        "running",
        "at most",
        "committed at most",
        "preempted",
        "first token",
        "tokens/s",
    )
    yield from table(head, rows, INDENT)


def _advice(report: CapacityReport) -> Iterator[str]:
    """Yield which quantisation to pick, of those that quire can serve."""
    conditions = f"For {gib(report.memory_bytes)} GiB and {report.context} tokens:"
    served = [fit for fit in report.fits if fit.whole_context[-1]]
    if not served:
        shorter = [
            f"{fit.tokens} tokens with {fit.weights.name}" for fit in report.fits if fit.tokens
        ]
        instead = f"context ({', '.join(shorter)})" if shorter else "model"
        yield from prose(
            f"{conditions} no weights leave room for one sequence; take a smaller {instead}."
        )
        return
    counts = [f"{fit.whole_context[-1]} with {fit.weights.name}" for fit in served]
    yield from prose(
        f"{conditions} {served[0].weights.name} weights are the widest that fit. Sequences of "
        f"full length at once: {', '.join(counts)}."
    )


def pair_name(weights: Packing, kv: Packing) -> str:
    """Write both packings, as people write them."""
    return f"{weights.name}/{kv.name}"
