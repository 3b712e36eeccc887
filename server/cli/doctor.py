"""The ``quire doctor`` command: tests the machine and reports in plain words or as JSON. Imports
neither the native extension nor MLX, because either may be broken."""

import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from engine.first_hour import FirstHour
from engine.selftest import KVBackendReport, MachineReport, SelfTestOptions, check_machine
from kvcache.budget import gib
from kvcache.selftest.run import SelfTest, SelfTestReport
from server.cli.settings import read_settings
from server.config import SettingError, Tables, engine_config

BENCH = (sys.executable, "-P", "-c", "from server.cli.commands import main; main()", "bench")
# How many of a measurement's checks, its last ones, are printed.
SHOWN_STEPS = 3


def run_doctor(
    file: Path | None,
    flags: Tables,
    progress: Callable[[str], None],
    *,
    as_json: bool = False,
    **tests: bool,
) -> tuple[str, bool]:
    """Return the report, and True if a kind of memory for K and V works with these settings.
    progress: called with test names. tests: fields of SelfTestOptions. Raises SettingError."""
    config = engine_config(read_settings(file, flags))
    report = check_machine(SelfTestOptions(config, **tests), progress)
    if as_json:
        return json.dumps(report.as_json(), indent=2), report.serves
    return "\n".join(report_lines(report)), report.serves


def run_first_hour(
    file: Path | None,
    flags: Tables,
    models: Sequence[str],
    progress: Callable[[str], None],
    tell: Callable[[str], None],
) -> bool:
    """Measure this machine and these models, and write a file into the working folder. Call
    ``progress`` with ids of questions, and ``tell`` with lines of text. Return True if a backend
    works. Raises SettingError."""
    config = engine_config(read_settings(file, flags))
    path = Path(f"quire-first-hour-{datetime.now(UTC):%Y%m%d-%H%M%S}.log")
    bench = [*BENCH, "--json", *(() if file is None else ("--config", str(file)))]
    first_hour = FirstHour(config, path, bench, models)
    try:
        for answer in first_hour.answers(progress):
            tell(f"{answer['id']}: {answer['question']}")
            for step in answer["steps"][-SHOWN_STEPS:]:
                tell(f"    {step['name']}: {step['said']} ({step['seconds']:.2f} s)")
            tell(f"    {answer['fault'] or 'done'}")
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror}: run this in a folder of yours") from error
    tell(f"All answers are in {path}, without private data: please attach it to an issue")
    return first_hour.report is not None and first_hour.report.serves


def report_lines(report: MachineReport) -> list[str]:
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
    for kv_backend in report.kv_backends:
        lines += _kv_backend_lines(kv_backend)
    choice = [f"{'' if number else 'choice':<11}{why}" for number, why in enumerate(report.reasons)]
    warnings = [f"warning    {why}" for why in report.warnings if why not in report.reasons]
    return [*lines, "", *choice, *warnings, _verdict(report)]


def _extension(report: MachineReport) -> str:
    extension = report.extension
    if extension.fault:
        return f"cannot be loaded: {extension.fault}"
    built_for = extension.facts["mlx_built_for"]
    fits = "which is installed" if extension.matches else "which is not what is installed"
    kernels = ", ".join(extension.facts["instruction_sets"])
    return f"built for MLX {built_for}, {fits}; CPU kernels: {kernels}"


def _device(report: MachineReport) -> str:
    device = report.device
    if device is None:
        has_metal = report.extension.facts.get("has_metal")
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


def _memory(report: MachineReport) -> str:
    memory = report.memory
    return (
        f"{gib(memory.total_bytes)}, of which {gib(memory.available_bytes)} are available and "
        f"{gib(report.headroom_bytes)} are left to others: {gib(report.usable_bytes)} for weights, "
        "activations and K and V"
    )


def _kv_backend_lines(report: KVBackendReport) -> list[str]:
    head, tests = f"{report.kv_backend!s:<16}", report.tests
    if report.missing:
        return [f"{head}not here: {report.missing}", *_faults(report)]
    lines = [f"{head}{'does not work' if report.fault else 'works'}", *_faults(report)]
    lines += _results("canary", tests[SelfTest.KV_BACKEND])
    if kernels := tests.get(SelfTest.KERNELS):
        lines.append(_summary("kernels", kernels))
    if stress := tests.get(SelfTest.STRESS):
        lines.append(_summary("stress test", stress))
        lines += [f"    {result.text}" for result in stress.results[-1:]]
    if release := tests.get(SelfTest.RELEASE):
        lines += _results("release test", release)
    if report.remembered:
        lines.append(f"  written down: {report.remembered}")
    if report.kv_backend.on_gpu:
        heaps = "are given back when they are empty, unless cache.release_heaps is false"
        if not report.releases_heaps:
            heaps = "are kept until the process ends: no release test has passed here"
        lines.append(f"  heaps {heaps}")
    return lines


def _faults(report: KVBackendReport) -> list[str]:
    standing = report.standing_faults
    forgotten = [fault for fault in report.faults if fault not in standing]
    return [f"  has failed here: {fault}" for fault in standing] + [
        f"  had failed here, which is forgotten now: {fault}" for fault in forgotten
    ]


def _results(name: str, report: SelfTestReport) -> list[str]:
    return [_summary(name, report)] + [
        f"    {'' if result.passed else 'FAILED '}{result.name}: {result.text}"
        for result in report.results
    ]


def _summary(name: str, report: SelfTestReport) -> str:
    outcome = f"failed: {report.fault}" if report.fault else "passed"
    return f"  {name}: {len(report.results)} steps in {report.seconds:.1f} s, {outcome}"


def _verdict(report: MachineReport) -> str:
    if report.chosen is None:
        return "Nothing can serve as configured."
    fault = report.of(report.chosen).fault
    if fault:
        return f"{report.chosen} would serve, and it does not work here: {fault}."
    return f"{report.chosen} can serve."
