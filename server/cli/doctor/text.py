"""What ``quire doctor`` does: examines, and hands back the report in plain words, or as JSON.

Nothing here imports the native extension or MLX: they may be what is wrong.
"""

import json
from collections.abc import Callable
from pathlib import Path

from engine.doctor.examine import Wishes, examine
from engine.doctor.report import DoctorReport, Examination
from kvcache.canary.report import TrialReport
from kvcache.memory_budget import gib
from server.cli.settings import read_settings
from server.config import Tables, engine_config


def examine_machine(
    file: Path | None,
    flags: Tables,
    progress: Callable[[str], None],
    *,
    as_json: bool = False,
    **tests: bool,
) -> tuple[str, bool]:
    """Return the report, and whether something can serve with these settings. progress: called with
    each thing that is being done. tests: see Wishes. Raises SettingError."""
    config = engine_config(read_settings(file, flags))
    report = examine(Wishes(config, **tests), progress)
    if as_json:
        return json.dumps(report.as_json(), indent=2), report.serves
    return "\n".join(report_lines(report)), report.serves


def report_lines(report: DoctorReport) -> list[str]:
    """Write the whole report for people."""
    machine, extension = report.machine, report.extension
    lines = [
        f"machine    {machine.model}, {machine.processor}",
        f"system     {machine.system}, Python {report.python}",
        f"MLX        {extension.mlx_installed}{f', {report.wheel}' if report.wheel else ''}",
        f"extension  {_extension(report)}",
        f"Metal      {_device(report)}",
        f"memory     {_memory(report)}",
        "",
    ]
    for examination in report.examinations:
        lines += _examined(examination)
    choice = [f"{'' if number else 'choice':<11}{why}" for number, why in enumerate(report.reasons)]
    warnings = [f"warning    {why}" for why in report.warnings if why not in report.reasons]
    return [*lines, "", *choice, *warnings, _verdict(report)]


def _extension(report: DoctorReport) -> str:
    extension = report.extension
    if extension.fault:
        return f"cannot be loaded: {extension.fault}"
    built_for = extension.said["mlx_built_for"]
    fits = "which is installed" if extension.matches else "which is not what is installed"
    kernels = ", ".join(extension.said["instruction_sets"])
    return f"built for MLX {built_for}, {fits}; CPU kernels: {kernels}"


def _device(report: DoctorReport) -> str:
    device = report.device
    if device is None:
        has_metal = report.extension.said.get("has_metal")
        return "no device" if has_metal else "not in this build"
    shown = {"name", "max_buffer_bytes", "recommended_working_set_bytes"}
    facts = "; ".join(
        f"{name.replace('_', ' ')}: {_in_words(value)}"
        for name, value in device.said.items()
        if name not in shown and not name.startswith("missing_for_")
    )
    return (
        f"{device.name}: working set {gib(device.working_set_bytes)}, largest buffer "
        f"{gib(device.max_buffer_bytes)}; {facts}"
    )


def _in_words(value: bool | int | str | list[str]) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _memory(report: DoctorReport) -> str:
    memory = report.memory
    return (
        f"{gib(memory.total_bytes)}, of which {gib(memory.available_bytes)} are available and "
        f"{gib(report.headroom_bytes)} are left to others: {gib(report.usable_bytes)} for weights, "
        "activations and K and V"
    )


def _examined(examination: Examination) -> list[str]:
    head = f"{examination.substrate!s:<16}"
    if examination.missing:
        return [f"{head}not here: {examination.missing}", *_faults(examination)]
    assert examination.canary is not None, "what is here is tried"
    lines = [f"{head}{'does not work' if examination.fault else 'works'}", *_faults(examination)]
    lines += _steps("canary", examination.canary)
    if examination.kernels is not None:
        lines += _summary("kernels", examination.kernels)
    if examination.stress is not None:
        lines += _summary("stress test", examination.stress)
        lines += [f"    {step.said}" for step in examination.stress.steps[-1:]]
    if examination.release is not None:
        lines += _steps("release test", examination.release)
    if examination.remembered:
        lines.append(f"  written down: {examination.remembered}")
    if examination.substrate.on_gpu:
        heaps = "are given back when they are empty, unless cache.release_heaps is false"
        if not examination.releases_heaps:
            heaps = "are kept until the process ends: no release test has passed here"
        lines.append(f"  heaps {heaps}")
    return lines


def _faults(examination: Examination) -> list[str]:
    standing = examination.standing_faults
    forgotten = [fault for fault in examination.faults if fault not in standing]
    return [f"  has failed here: {fault}" for fault in standing] + [
        f"  had failed here, which is forgotten now: {fault}" for fault in forgotten
    ]


def _steps(name: str, trial: TrialReport) -> list[str]:
    lines = _summary(name, trial)
    return lines + [
        f"    {'' if step.passed else 'FAILED '}{step.name}: {step.said}" for step in trial.steps
    ]


def _summary(name: str, trial: TrialReport) -> list[str]:
    outcome = f"failed: {trial.fault}" if trial.fault else "passed"
    return [f"  {name}: {len(trial.steps)} steps in {trial.seconds:.1f} s, {outcome}"]


def _verdict(report: DoctorReport) -> str:
    if report.chosen is None:
        return "Nothing can serve as configured."
    fault = report.of(report.chosen).fault
    if fault:
        return f"{report.chosen} would serve, and it does not work here: {fault}."
    return f"{report.chosen} can serve."
