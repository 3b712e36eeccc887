"""Examines this machine: everything that may fail is tried in a process of its own."""

import json
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.doctor.report import DoctorReport, Examination, Extension
from engine.machine import gpu_memory, machine_memory
from engine.pressure import PressureLevel, pressure_source
from kvcache.canary import stamp
from kvcache.canary.machine import installed_mlx, this_machine
from kvcache.canary.report import TrialReport
from kvcache.canary.run import (
    KERNELS,
    PACE,
    RELEASE,
    STRESS,
    STRESS_LIMIT_S,
    SUBSTRATE,
    USUAL,
    run_child,
    run_trial,
)
from kvcache.canary.stamp import Passed
from kvcache.canary.wheel import wheel_tag, wheel_warning
from kvcache.substrates import (
    NO_DEVICE,
    NO_METAL,
    ON_METAL,
    SubstrateError,
    choose_mapping,
    choose_substrate,
)
from kvcache.fault_memory import Act, FaultMemory
from kvcache.substrates import MetalDevice
from kvcache.substrates import Substrate

FACTS_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the doctor is asked for."""

    config: EngineConfig
    """What would serve."""
    release_test: bool = False
    stress: bool = False
    forget_faults: bool = False
    """Whether what substrates have done here before is forgotten, whatever they do now."""


def examine(wishes: Wishes, progress: Callable[[str], None]) -> DoctorReport:
    """Examine this machine. Loads no model, and writes nothing but faults and the stamps of passed
    tests. Faults of a substrate that works now are forgotten. progress: called with what is
    being done now, because it takes a while."""
    progress("the extension")
    extension = read_extension()
    device = MetalDevice.of(extension.said["metal"]) if extension.said.get("metal") else None
    no_metal = extension.fault or _no_metal(extension, device)
    found: dict[Substrate, Examination] = {}
    for substrate in (*ON_METAL, Substrate.POSIX):
        missing = extension.fault
        if substrate.on_gpu:
            missing = no_metal if device is None else "; ".join(device.missing[substrate.setting])
        found[substrate] = _examine_one(substrate, missing, wishes, progress)
    chosen: Substrate | None = None
    maps_while_running: bool | None = None
    warnings: tuple[str, ...] = ()
    try:
        choice = choose_substrate(
            wishes.config.substrate,
            no_metal=no_metal,
            trial=lambda substrate: found[substrate].refusal,
            remembered=lambda substrate: found[substrate].standing_faults,
        )
        choice = choose_mapping(choice, wishes.config.map_while_running, _has_passed_stress)
        chosen, reasons, warnings = choice.substrate, choice.reasons, choice.warnings
        maps_while_running = choice.maps_while_running
    except SubstrateError as error:
        reasons = (str(error),)
    memory = machine_memory()
    if chosen is not None and chosen.on_gpu and device is not None:
        memory = gpu_memory(memory, device.working_set_bytes, device.max_buffer_bytes)
    machine, wrong, pace = this_machine(), "", None
    if device is not None:
        wrong = wheel_warning(machine.processor)
        progress("how fast the device is when")
        pace = run_trial(PACE, Substrate.PAGED)
    return DoctorReport(
        machine=machine,
        python=platform.python_version(),
        extension=extension,
        device=device,
        memory=memory,
        headroom_bytes=memory.headroom_bytes(wishes.config.headroom_bytes),
        examinations=tuple(found.values()),
        chosen=chosen,
        maps_while_running=maps_while_running,
        reasons=reasons,
        wheel=wheel_tag(),
        wheel_warning=wrong,
        warnings=(*warnings, wrong) if wrong else warnings,
        pace=pace,
        pressure=PressureLevel(pressure_source()()).name.lower(),
    )


def read_extension() -> Extension:
    """Return the extension's own words, or why it has none."""
    installed = installed_mlx()
    outcome = run_child([sys.executable, "-m", "engine.doctor.facts"], FACTS_LIMIT_S)
    if outcome.fault:
        return Extension(installed, outcome.fault, {})
    try:
        return Extension(installed, "", dict(json.loads(outcome.last_line)))
    except ValueError:
        return Extension(installed, f"it said what cannot be read: {outcome.last_line[:200]!r}", {})


def _no_metal(extension: Extension, device: MetalDevice | None) -> str:
    if not extension.said["has_metal"]:
        return NO_METAL
    return NO_DEVICE if device is None else ""


def _examine_one(
    substrate: Substrate, missing: str, wishes: Wishes, progress: Callable[[str], None]
) -> Examination:
    faults = FaultMemory(substrate)
    examination = Examination(
        substrate, missing, releases_heaps=_may_release(substrate), faults=faults.found()
    )
    if wishes.forget_faults:
        _forget(faults, substrate)
    if not missing:
        examination = _try_out(examination, faults, wishes, progress)
    return replace(examination, standing_faults=faults.found())


def _try_out(
    examination: Examination, faults: FaultMemory, wishes: Wishes, progress: Callable[[str], None]
) -> Examination:
    substrate = examination.substrate
    progress(f"{substrate}: canary")
    pages = None if substrate.is_dense else wishes.config.page_bytes
    size = USUAL.to_argument() if substrate in (Substrate.SPARSE, Substrate.PAGED) else ""
    examination = replace(examination, canary=run_trial(SUBSTRATE, substrate, pages, size))
    if examination.fault:
        return examination
    progress(f"{substrate}: kernels")
    examination = replace(examination, kernels=run_trial(KERNELS, substrate))
    if examination.fault:
        return examination
    _forget(faults, substrate)
    if wishes.stress and not substrate.is_dense:
        progress(f"{substrate}: mappings under running commands")
        with faults.intent(Act.STRESS):
            stress = run_trial(STRESS, substrate, pages, limit_s=STRESS_LIMIT_S)
        remembered = _remember(Passed.STRESS, substrate, stress)
        examination = replace(examination, stress=stress, remembered=remembered)
        if stress.fault and substrate.on_gpu:
            faults.record(f"{Act.STRESS} failed: {stress.fault}")
    if wishes.release_test and substrate is not Substrate.METAL_DENSE and not examination.fault:
        progress(f"{substrate}: release of heaps")
        with faults.intent(Act.RELEASE_TEST):
            examination = _test_release(examination, pages)
    return examination


def _forget(faults: FaultMemory, substrate: Substrate) -> None:
    """Forget the faults of a substrate, and the stamps of tests that passed before them. Those that
    cannot be forgotten are still found."""
    with suppress(OSError):
        if faults.forget():
            for test in Passed:
                stamp.withdraw(test, substrate)


def _test_release(examination: Examination, page_bytes: int | None) -> Examination:
    substrate = examination.substrate
    report = run_trial(RELEASE, substrate, page_bytes)
    said = (examination.remembered, _remember(Passed.RELEASE, substrate, report))
    return replace(
        examination,
        release=report,
        releases_heaps=_may_release(substrate),
        remembered="; ".join(filter(None, said)),
    )


def _remember(test: Passed, substrate: Substrate, report: TrialReport) -> str:
    """Write down that a GPU's substrate has passed a test, for serving to go by, or withdraw it
    where it has not; return where, or why that cannot be, or ""."""
    if not substrate.on_gpu:
        return ""
    try:
        if report.passed:
            return str(stamp.write(test, substrate))
        stamp.withdraw(test, substrate)
    except OSError as error:
        return f"it could not be written down: {error}"
    return ""


def _may_release(substrate: Substrate) -> bool:
    return not substrate.on_gpu or stamp.is_there(Passed.RELEASE, substrate)


def _has_passed_stress(substrate: Substrate) -> bool:
    return stamp.is_there(Passed.STRESS, substrate)
