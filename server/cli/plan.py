"""``quire plan``: reads a model, plans its memory, and describes the plan in text and pictures."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from engine.kv_backend import metal_device
from engine.machine import machine_memory
from engine.planning.capacity import CapacityReport, plan_capacity
from engine.planning.devices import Device, device_names, find_device, this_device
from engine.planning.memory import BF16, kv_bytes_per_token, read_shape, slot_bytes
from kvcache.layout import LayoutError
from kvcache.memory_budget import gib
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub import CONFIG_FILES, FoundModel, find_model
from server.catalogue.local_models import shape_problem
from server.cli.model_files import ModelError, check_found, checkpoint_of, make_plan, model_errors
from server.cli.sentences import table
from server.cli.settings import read_settings
from server.config import Config, SettingError, engine_config, parse_size

COLUMNS = 100
GIB = 1024**3
KIB = 1024
MICROSECONDS = 1e6
INDENT = "  "
# Mean sequence lengths in the table of page sizes; the picture shows more lengths.
SHOWN_MEANS = (1024, 4096)
# Sequence lengths in tokens. No length fills its last block, so that the table shows waste.
SHOWN_LENGTHS = (100, 300, 1000, 3000, 10000, 30000)
DEFAULT_CONTEXT = 32 * 1024
MIN_CONTEXT = 2
NO_MATPLOTLIB = "--out draws with matplotlib, which is not installed: pip install 'quire[plan]'"


def plan_model(
    name: str,
    file: Path | None,
    *,
    context: int | None = None,
    memory: str | None = None,
    device: str | None = None,
    out: Path | None = None,
) -> str:
    """Return a model's plan as text; fetch no weights. context: in tokens; None means 32768, or the
    model's limit if lower. memory: such as 24GiB; None means all of the device's. device: a name;
    None means this machine. out: a folder for pictures. Raises StartError."""
    settings = read_settings(file, {})
    target = _device(device)
    memory_bytes, working_set_bytes = _memory_bytes(memory, target, here=device is None)
    with model_errors(), FolderReader() as reader:
        model = find_model(name, settings.models.folders, files=CONFIG_FILES, reader=reader)
        if problem := reader.read(shape_problem, model.folder):
            raise ModelError(problem)
        shape = read_shape(model.folder)
        has_weights = model.missing or any(model.folder.glob("*.safetensors"))
        if has_weights:
            check_found(reader, model, settings, tokenizer=False)
    if context is None:
        context = min(DEFAULT_CONTEXT, shape.max_position_embeddings)
    if context < MIN_CONTEXT:
        raise SettingError(f"--context is {context} tokens; it must be {MIN_CONTEXT} at least")
    here = f"This machine: {model.folder} holds no weights that could be served."
    if has_weights:
        here = _on_this_machine(settings, model)
    try:
        report = plan_capacity(
            shape,
            target,
            memory_bytes,
            context,
            engine_config(settings),
            working_set_bytes=working_set_bytes,
        )
    except LayoutError as error:
        raise SettingError(str(error)) from error
    lines = [here, "", *report_lines(report)]
    if out is None:
        lines.append("Pictures: --out FOLDER draws them.")
    else:
        lines += _draw(report, out, model.name)
    return "\n".join(lines)


def _device(name: str | None) -> Device:
    if name is None:
        return this_device()
    device = find_device(name)
    if device is None:
        raise SettingError(f"--device {name!r} is not known; known are {', '.join(device_names())}")
    return device


def _memory_bytes(size: str | None, device: Device, *, here: bool) -> tuple[int, int | None]:
    """Return the memory in bytes, and the bytes that the GPU may use (None if unknown)."""
    if size is not None:
        try:
            return parse_size(size), None
        except ValueError as error:
            raise SettingError(f"--memory {size!r} is not a size such as 24GiB") from error
    if not here:
        return device.memory_bytes, None
    metal = metal_device() if device.on_gpu else None
    return machine_memory().total_bytes, metal.working_set_bytes if metal else None


def _on_this_machine(settings: Config, model: FoundModel) -> str:
    """Return a text that says how the model fills this machine's memory, or why it cannot."""
    with model_errors():
        checkpoint = checkpoint_of(model, settings)
    try:
        plan = make_plan(settings, checkpoint)
    except SettingError as error:
        return f"This machine cannot serve it: {error}"
    return "\n".join([*_notes(model), *plan.lines(), *plan.warnings])


def _notes(model: FoundModel) -> list[str]:
    """Return notes for the user on a model that is not, or not wholly, on this disk."""
    notes = [model.notice] if model.notice else []
    if model.missing:
        to_fetch = f"{gib(model.missing_bytes)} of {gib(model.weights_bytes)} of weights"
        notes.append(f"not here yet: {to_fetch}; sizes are what the hub says")
    return notes


def _draw(report: CapacityReport, folder: Path, model: str) -> list[str]:
    # Imported here: matplotlib is optional.
    try:
        from server.cli.plan_pictures import draw_pictures
    except ModuleNotFoundError as error:
        raise SettingError(NO_MATPLOTLIB) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = draw_pictures(report, folder, model)
    except OSError as error:
        raise SettingError(f"--out {folder}: {error.strerror}") from error
    return [f"Pictures: {folder}", *(f"  {file.name}" for file in files)]


def report_lines(report: CapacityReport) -> Iterator[str]:
    for part in (_head, _by_context, _quantisation, _committed, _blocks, _fits, _crowd, _advice):
        yield from part(report)
        yield ""


def gibs(amount: float) -> str:
    """Write bytes in GiB, with two decimals, or with four below a tenth of a GiB."""
    return f"{amount / GIB:.4f}" if 0 < amount < GIB / 10 else f"{amount / GIB:.2f}"


def prose(text: str, indent: str = "") -> Iterator[str]:
    """Yield the lines of a text that is wrapped to COLUMNS characters."""
    yield from textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def note(text: str) -> Iterator[str]:
    """Yield the lines of an indented text, which stands below a table's heading."""
    yield from prose(text, INDENT)


def _head(report: CapacityReport) -> Iterator[str]:
    shape, device, demand = report.shape, report.device, report.demand
    yield f"Capacity on {device.name} with {gibs(report.memory_bytes)} GiB"
    of_gpu = f"Its GPU may use {gibs(demand.machine_bytes)} GiB of these. " if device.on_gpu else ""
    yield from note(
        f"{of_gpu}{shape.parameters / 1e6:.0f} million parameters; the device reads "
        f"{device.bytes_per_s / 1e9:.0f} GB/s and does {device.ops_per_s / 1e12:.1f} Tops/s, at "
        f"its peak. {gibs(demand.usable_bytes - demand.fixed_bytes)} GiB are there for weights, K "
        f"and V: {gibs(demand.headroom_bytes)} are left to other programs, activations take "
        f"{gibs(demand.activation_bytes)}, MLX's cache {gibs(demand.mlx_cache_bytes)}, "
        f"compiled grammars {gibs(demand.grammar_bytes)}."
    )
    if report.problem is not None:
        yield from note(f"This is what would fit, and is not served there: {report.problem}.")


def _by_context(report: CapacityReport) -> Iterator[str]:
    first = report.by_context[0]
    yield f"Weights against K and V by context, in GiB, both {first.kv.name}"
    per_token = kv_bytes_per_token(report.shape, first.kv)
    states = bool(first.states_bytes)
    beside = (
        f" Beside that a sequence may have {gibs(first.states_bytes)} GiB, however long it is: the "
        f"states of its recurrent layers, in slots of {gibs(slot_bytes(report.shape))}."
    )
    yield from note(f"Every token of context costs {per_token / KIB:g} KiB.{beside * states}")
    known = report.shape.max_position_embeddings
    rows = [
        (
            f"{r.context}" + (" *" if r.context > known else ""),
            gibs(r.weights_bytes),
            gibs(r.kv_bytes),
            *([gibs(r.states_bytes)] if states else []),
            gibs(r.total_bytes),
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
            f"{step.resident.weights.name}/{step.resident.kv.name}",
            gibs(step.resident.weights_bytes),
            gibs(step.resident.kv_bytes),
            gibs(step.resident.total_bytes),
            gibs(first.total_bytes - step.resident.total_bytes),
            gibs(step.room.kv_bytes),
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
            gibs(tokens * per_token),
            *(gibs(a.committed_bytes(tokens)) for a in report.allocations),
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
            gibs(fit.room.kv_bytes),
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
            f"No crowd was simulated: {gibs(report.memory_bytes)} GiB do not hold the "
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
            f"{gibs(outcome.peak_committed_bytes)} GiB",
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
    """Yield a text that names the widest type of weights that fits."""
    conditions = f"For {gibs(report.memory_bytes)} GiB and {report.context} tokens:"
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
