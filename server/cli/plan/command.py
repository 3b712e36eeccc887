"""``quire plan``: read a model, plan its memory, draw pictures, and return the text."""

from dataclasses import dataclass
from pathlib import Path

from engine.machine import machine_memory
from engine.planning.capacity import CapacityReport, plan_capacity
from engine.planning.devices import Device, device_names, find_device, this_device
from engine.planning.memory import read_shape
from engine.substrate import metal_device
from kvcache.layout import LayoutError
from kvcache.memory_budget import gib
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub import CONFIG_FILES, FoundModel, find_model
from server.cli.model_files import check_found, check_shape, checkpoint_of, make_plan, model_errors
from server.cli.plan.text import report_lines
from server.cli.settings import read_settings
from server.config import Config, SettingError, engine_config, parse_size

DEFAULT_CONTEXT = 32 * 1024
MIN_CONTEXT = 2
NO_MATPLOTLIB = "--out draws with matplotlib, which is not installed: pip install 'quire[plan]'"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The flags of the command."""

    context: int | None = None
    """Tokens; None: 32768, or those that the model knows where these are fewer."""
    memory: str | None = None
    """A size such as 24GiB; None: the device's, or this machine's."""
    device: str | None = None
    """A name from the list; None: this machine."""
    out: Path | None = None
    """A folder for pictures; None: no pictures."""


def plan_model(name: str, file: Path | None, options: PlanOptions) -> str:
    """Write the plan of a model for people. The configuration of a model on the hub is fetched, and
    no weights. Raises StartError."""
    settings = read_settings(file, {})
    device = _device(options)
    memory_bytes, working_set_bytes = _memory_bytes(options, device)
    with model_errors(), FolderReader() as reader:
        found = find_model(name, settings.models.folders, files=CONFIG_FILES)
        check_shape(reader, found.folder)
        shape = read_shape(found.folder)
        has_weights = found.missing or any(found.folder.glob("*.safetensors"))
        if has_weights:
            check_found(reader, found, settings, tokenizer=False)
    context = options.context
    if context is None:
        context = min(DEFAULT_CONTEXT, shape.max_position_embeddings)
    if context < MIN_CONTEXT:
        raise SettingError(f"--context is {context} tokens; it must be {MIN_CONTEXT} at least")
    here = f"This machine: {found.folder} holds no weights that could be served."
    if has_weights:
        here = _on_this_machine(settings, found)
    try:
        report = plan_capacity(
            shape,
            device,
            memory_bytes,
            context,
            engine_config(settings),
            working_set_bytes=working_set_bytes,
        )
    except LayoutError as error:
        raise SettingError(str(error)) from error
    lines = [here, "", *report_lines(report)]
    lines += (
        ["Pictures: --out FOLDER draws them."]
        if options.out is None
        else _draw(report, options, found.name)
    )
    return "\n".join(lines)


def _device(options: PlanOptions) -> Device:
    if options.device is None:
        return this_device()
    device = find_device(options.device)
    if device is None:
        raise SettingError(
            f"--device {options.device!r} is not known; known are {', '.join(device_names())}"
        )
    return device


def _memory_bytes(options: PlanOptions, device: Device) -> tuple[int, int | None]:
    """Return bytes of the machine, and those that the device may use; None where the device is not
    here."""
    if options.memory is not None:
        try:
            return parse_size(options.memory), None
        except ValueError as error:
            raise SettingError(
                f"--memory {options.memory!r} is not a size such as 24GiB"
            ) from error
    if options.device is not None:
        return device.memory_bytes, None
    here = metal_device()
    return machine_memory().total_bytes, here.working_set_bytes if here and device.on_gpu else None


def _on_this_machine(settings: Config, found: FoundModel) -> str:
    """Write how the checkpoint would lie in this machine's memory, or why that cannot be said."""
    with model_errors():
        checkpoint = checkpoint_of(found, settings)
    try:
        plan = make_plan(settings, checkpoint)
    except SettingError as error:
        return f"This machine cannot serve it: {error}"
    return "\n".join([*_notes(found), *plan.lines(), *plan.warnings])


def _notes(found: FoundModel) -> list[str]:
    """Write where the figures are from, where they are not from weights that are here."""
    notes = [found.notice] if found.notice else []
    if found.missing:
        to_fetch = f"{gib(found.missing_bytes)} of {gib(found.weights_bytes)} of weights"
        notes.append(f"not here yet: {to_fetch}; sizes are what the hub says")
    return notes


def _draw(report: CapacityReport, options: PlanOptions, model: str) -> list[str]:
    assert options.out is not None
    # Here and not above: only pictures need matplotlib, which may not be there.
    try:
        from server.cli.plan.pictures import draw_pictures
    except ModuleNotFoundError as error:
        raise SettingError(NO_MATPLOTLIB) from error
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        files = draw_pictures(report, options.out, model)
    except OSError as error:
        raise SettingError(f"--out {options.out}: {error.strerror}") from error
    return [f"Pictures: {options.out}", *(f"  {file.name}" for file in files)]
