"""``quire plan``: read a model, plan its memory, draw pictures, and return the text."""

from pathlib import Path

from engine.machine import machine_memory
from engine.models.checkpoint import CheckpointError
from engine.planning.capacity import CapacityReport, plan_capacity
from engine.planning.devices import Device, device_names, find_device, this_device
from engine.planning.memory import read_shape
from engine.substrate import metal_device
from kvcache.layout import LayoutError
from kvcache.memory_budget import gib
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub import CONFIG_FILES, FoundModel, find_model
from server.catalogue.local_models import shape_problem
from server.cli.model_files import check_found, checkpoint_of, make_plan, model_errors
from server.cli.plan.text import report_lines
from server.cli.settings import read_settings
from server.config import Config, SettingError, engine_config, parse_size

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
    """Write the plan of a model for people. The configuration of a model on the hub is fetched, and
    no weights. context: tokens; None: 32768, or those that the model knows where these are fewer.
    memory: a size such as 24GiB; None: the device's. device: None is this machine. out: a folder
    for pictures. Raises StartError."""
    settings = read_settings(file, {})
    target = _device(device)
    memory_bytes, working_set_bytes = _memory_bytes(memory, target, here=device is None)
    with model_errors(), FolderReader() as reader:
        found = find_model(name, settings.models.folders, files=CONFIG_FILES)
        if problem := reader.read(shape_problem, found.folder):
            raise CheckpointError(problem)
        shape = read_shape(found.folder)
        has_weights = found.missing or any(found.folder.glob("*.safetensors"))
        if has_weights:
            check_found(reader, found, settings, tokenizer=False)
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
        lines += _draw(report, out, found.name)
    return "\n".join(lines)


def _device(name: str | None) -> Device:
    if name is None:
        return this_device()
    device = find_device(name)
    if device is None:
        raise SettingError(f"--device {name!r} is not known; known are {', '.join(device_names())}")
    return device


def _memory_bytes(size: str | None, device: Device, *, here: bool) -> tuple[int, int | None]:
    """Return bytes of the machine, and those that the device may use; None where it is not here."""
    if size is not None:
        try:
            return parse_size(size), None
        except ValueError as error:
            raise SettingError(f"--memory {size!r} is not a size such as 24GiB") from error
    if not here:
        return device.memory_bytes, None
    metal = metal_device() if device.on_gpu else None
    return machine_memory().total_bytes, metal.working_set_bytes if metal else None


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


def _draw(report: CapacityReport, folder: Path, model: str) -> list[str]:
    # Here and not above: only pictures need matplotlib, which may not be there.
    try:
        from server.cli.plan.pictures import draw_pictures
    except ModuleNotFoundError as error:
        raise SettingError(NO_MATPLOTLIB) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = draw_pictures(report, folder, model)
    except OSError as error:
        raise SettingError(f"--out {folder}: {error.strerror}") from error
    return [f"Pictures: {folder}", *(f"  {file.name}" for file in files)]
