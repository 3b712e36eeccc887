"""``quire plan``: reads a model, plans its memory, and describes the plan in text and pictures."""

import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.kv_backend import metal_device
from engine.machine import machine_memory
from engine.models.checkpoint import Checkpoint, promised_checkpoint
from engine.planning.capacity import CHUNK_TOKENS, CapacityReport, plan_capacity
from engine.planning.devices import DEVICES, Device, find_device, this_device
from engine.planning.estimate import Estimate, estimate, in_four_bits, plan_elsewhere
from engine.planning.memory import ModelShape, kv_shape, read_shape
from kvcache.budget import gib
from server.catalogue.hub import CONFIG_FILES, FoundModel, find_model
from server.catalogue.local_models import check_shape
from server.cli.model_files import (
    check_found,
    checkpoint_of,
    find_heads,
    model_errors,
    new_reader,
    planning_errors,
)
from server.cli.models import Machine
from server.cli.sentences import table, tokens_label
from server.cli.settings import read_settings
from server.config import SettingError, engine_config, parse_size

COLUMNS = 100
GIB = 1024**3
KIB = 1024
INDENT = "  "
DEFAULT_CONTEXT = 32 * 1024
MIN_CONTEXT = 2
# Numbers of tokens for which the plan tells the speed of one chat.
SHORT_CONTEXT, LONG_CONTEXT, LONG_PROMPT = 1024, 32 * 1024, 4 * 1024
# The plan tells how much memory this many chats save by sharing their first LONG_PROMPT tokens.
SHARING_CHATS = 8
NO_MATPLOTLIB = "--out draws with matplotlib, which is not installed: pip install 'quire[plan]'"


@dataclass(frozen=True, slots=True)
class Target:
    """A machine to plan for."""

    device: Device
    here: bool
    """True for the machine that runs quire, with all of the memory that it has."""

    @classmethod
    def of(cls, name: str | None, memory: str | None) -> "Target":
        """Return the machine of the options --device and --memory. Raises SettingError."""
        device = this_device() if name is None else find_device(name)
        if device is None:
            known = ", ".join(each.name for each in DEVICES)
            raise SettingError(f"--device {name!r} is not known; known are {known}")
        size, gpu_bytes = device.memory_bytes, None
        if memory is not None:
            try:
                size = parse_size(memory)
            except ValueError as error:
                raise SettingError(f"--memory {memory!r} is not a size such as 24GiB") from error
        elif name is None:
            metal = metal_device() if device.on_gpu else None
            size = machine_memory().total_bytes
            gpu_bytes = metal.working_set_bytes if metal else None
        return cls(device.with_memory(size, gpu_bytes), name is None and memory is None)

    def __str__(self) -> str:
        name = self.device.name if self.device.on_gpu else "a CPU"
        return f"{name} with {gibs(self.device.memory_bytes)} GiB"


def plan_model(
    name: str,
    file: Path | None,
    *,
    context: int | None = None,
    memory: str | None = None,
    device: str | None = None,
    out: Path | None = None,
) -> str:
    """Return a model's plan as text; fetch no weights. context: in tokens; None means the longest
    that fits, but at most 32768 in the tables. memory: such as 24GiB; None means all that the
    device has. device: a name; None means this machine. out: picture folder. Raises StartError."""
    if context is not None and context < MIN_CONTEXT:
        raise SettingError(f"--context is {context} tokens; it must be {MIN_CONTEXT} at least")
    settings = read_settings(file, {"engine": {"max_model_len": context}})
    target = Target.of(device, memory)
    with model_errors(), new_reader(settings) as reader:
        model = find_model(name, settings.models.folders, files=CONFIG_FILES, reader=reader)
        reader.read(check_shape, model.folder)
        shape = read_shape(model.folder)
        if model.missing or any(model.folder.glob("*.safetensors")):
            heads = find_heads(reader, model, settings)
            check_found(reader, model, settings, heads, tokenizer=False)
            checkpoint = checkpoint_of(model, settings, heads)
        else:
            drafts = engine_config(settings).drafts
            checkpoint = promised_checkpoint(model.folder, drafts=drafts)
    if context is None:
        context = min(DEFAULT_CONTEXT, shape.spec.max_position_embeddings)
    with planning_errors():
        report = plan_capacity(shape, target.device, context, engine_config(settings))
    planned, problem = _estimate_or_four_bits(Machine(settings), target, shape, checkpoint)
    lines = [*answers(target, planned, problem), "", "Details", "", *_notes(model)]
    if planned is not None:
        plan = planned.plan
        lines += [*plan.memory.lines(), f"drafts: {plan.draft_source}"]
        lines += [*([plan.device, *plan.warnings] if target.here else []), ""]
    lines += [*report_lines(report), ""]
    if out is None:
        lines.append("Pictures: --out FOLDER draws them.")
    else:
        lines += _draw(report, out, model.name)
    return "\n".join(lines)


def read_estimate(machine: Machine, target: Target, folder: Path) -> Estimate:
    """Return the estimate of a model from its ``config.json`` alone. Raises SettingError, which
    names the size that does not fit."""
    return _estimate(machine, target, promised_checkpoint(folder))


def _estimate(machine: Machine, target: Target, checkpoint: Checkpoint) -> Estimate:
    config = engine_config(machine.settings)
    if target.here:
        return estimate(machine.plan(checkpoint), target.device, config)
    with planning_errors():
        elsewhere = plan_elsewhere(config, checkpoint, target.device)
    return estimate(elsewhere, target.device, config)


def _estimate_or_four_bits(
    machine: Machine, target: Target, shape: ModelShape, checkpoint: Checkpoint
) -> tuple[Estimate | None, str]:
    """Return an estimate and an empty text. If the model does not fit as it is stored, the text is
    the reason, and the estimate is for MLX's 4 bits, or None if they do not help."""
    try:
        return _estimate(machine, target, checkpoint), ""
    except SettingError as error:
        if shape.quantization is None:
            packed = in_four_bits(shape, checkpoint, on_gpu=target.device.on_gpu)
            with suppress(SettingError):
                return _estimate(machine, target, packed), str(error)
        return None, str(error)


def answers(target: Target, planned: Estimate | None, problem: str) -> list[str]:
    """Return five lines: whether a model fits, its context, its chats, and how fast it is."""
    if planned is None:
        return _rows(f"no, not on {target}: {problem}", *["none"] * 4)
    memory, spec = planned.plan.memory, planned.plan.checkpoint.spec
    longest, known = memory.max_model_len, spec.max_position_embeddings
    short, long, prompt = (min(n, longest) for n in (SHORT_CONTEXT, LONG_CONTEXT, LONG_PROMPT))
    speeds = [
        f"{rate(planned.decode_tokens_per_s(n))} at {tokens_label(n)}"
        for n in sorted({short, long})
    ]
    chats = [f"{planned.chats(n)} of {n} tokens" for n in sorted({prompt, longest})]
    fits = (
        f"yes, on {target}: weights take {gib(memory.demand.weights_bytes)}, K and V up to "
        f"{gib(memory.kv_budget_bytes)}"
    )
    return _rows(
        f"no, not on {target}: {problem}" if problem else fits,
        f"{longest} tokens{' in 4 bits' if problem else ''}"
        f"{f' of the {known} that the model knows' if longest < known else ''}",
        ", ".join(chats),
        f"{', '.join(speeds)} tokens of context (computed, not measured: "
        f"{target.device.bytes_per_s / 1e9:.0f} GB/s)",
        f"{rate(planned.first_token_s(prompt))} s for a prompt of {tokens_label(prompt)} tokens "
        f"(computed, not measured: {target.device.ops_per_s / 1e12:.1f} Tops/s)",
    )


def _rows(*texts: str) -> list[str]:
    names = ("fits", "context", "chats at once", "tokens/s of one chat", "first token")
    width = max(map(len, names))
    return [f"{name.ljust(width)}  {text}" for name, text in zip(names, texts, strict=True)]


def rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s >= 10 else f"{per_s:.1f}"


def _notes(model: FoundModel) -> list[str]:
    """Return notes for the user: why the cache was used, and how much is not on this disk yet."""
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


def gibs(amount: float) -> str:
    """Write bytes in GiB, with two decimals, or with four below a tenth of a GiB."""
    return f"{amount / GIB:.4f}" if 0 < amount < GIB / 10 else f"{amount / GIB:.2f}"


def note(text: str) -> Iterator[str]:
    """Yield the lines of a text, indented and wrapped to COLUMNS characters."""
    yield from textwrap.wrap(
        text, COLUMNS, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
    )


def report_lines(report: CapacityReport) -> Iterator[str]:
    yield "What pages buy"
    token = kv_shape(report.shape).lasting_bytes_per_token
    shared = (SHARING_CHATS - 1) * LONG_PROMPT * token
    dense, chunks, own = report.fits[-1].fifth_context
    states_bytes = report.fits[0].resident.states_bytes
    states = f", and a sequence up to {gib(states_bytes)} for the states of its recurrent layers"
    fits = (
        f"Sequences of {report.fifth_tokens} tokens (a fifth of the context) fit {own} times "
        f"into pages, {chunks} times into {CHUNK_TOKENS}-token chunks, and {dense} times where "
        f"each has all of {report.context} tokens from the start. "
    )
    yield from note(
        f"{fits * bool(own)}A token takes {token / KIB:g} KiB"
        f"{states * bool(states_bytes)}. Pages are shared: {SHARING_CHATS} chats "
        f"with the same first {LONG_PROMPT} tokens hold them once, which saves {gib(shared)}."
    )
    yield from note(
        "Room is what the weights leave to K and V, tokens are those of all sequences together; "
        "weights are refused that leave too few for a short conversation. q8 and q4 are MLX's "
        "groups of 64: 8.5 and 4.5 bits per number."
    )
    rows = [
        (
            fit.resident.weights.name,
            gibs(fit.resident.weights_bytes),
            gibs(fit.room.kv_bytes),
            str(fit.tokens or "refused"),
            str(fit.whole_context[-1]),
            *map(str, fit.fifth_context),
        )
        for fit in report.fits
    ]
    names = [f"{report.fifth_tokens}: {a.name}" for a in report.allocations]
    head = ("weights", "GiB", "room (GiB)", "tokens", f"{report.context} each", *names)
    yield from table(head, rows, INDENT)
