"""Tests whether this machine can serve (`quire doctor`). Risky tests run in child processes.

If this module runs as a program, it prints facts about the native extension. `quire doctor` runs
this program in a child process, because loading the extension may crash.
"""

import json
import platform
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from engine.config import EngineConfig
from engine.machine import (
    MachineMemory,
    gpu_memory,
    machine_memory,
    memory_pressure,
    raise_descriptor_limit,
)
from kvcache.backends.choice import (
    NO_DEVICE,
    NO_METAL,
    ON_METAL,
    KVBackend,
    KVBackendError,
    MetalDevice,
    choose_kv_backend,
    choose_mapping,
)
from kvcache.backends.faults import Act, FaultMemory, forget_deaths
from kvcache.selftest.machine import Machine, installed_mlx, this_machine, wheel_tag, wheel_warning
from kvcache.selftest.run import (
    STRESS_LIMIT_S,
    USUAL,
    SelfTest,
    SelfTestReport,
    has_passed,
    run_child,
    run_selftest,
    withdraw_stamp,
    write_stamp,
)

# The version of the JSON report. It rises when a field changes its meaning or is removed.
SCHEMA = 1
FACTS_LIMIT_S = 60.0
NAMES_IN_JSON = {
    "canary": SelfTest.KV_BACKEND,
    "kernels": SelfTest.KERNELS,
    "release_test": SelfTest.RELEASE,
    "stress_test": SelfTest.STRESS,
}


@dataclass(frozen=True, slots=True)
class SelfTestOptions:
    """The options of `quire doctor`: settings for the tests, and optional tests to run."""

    config: EngineConfig
    release_test: bool = False
    stress: bool = False
    forget_faults: bool = False
    """Whether to delete the recorded faults of all backends before the tests."""


@dataclass(frozen=True, slots=True)
class Extension:
    """The result of loading the native extension, and the version of the installed MLX."""

    mlx_installed: str
    fault: str
    """The reason why the extension cannot be loaded, or "" if it was loaded."""
    facts: dict[str, Any]
    """The values of ``extension_facts``, or an empty dict if the extension cannot be loaded."""

    @property
    def matches(self) -> bool:
        """Return True if the extension was built for the installed version of MLX."""
        return self.facts.get("mlx_built_for") == self.mlx_installed


@dataclass(slots=True)
class KVBackendReport:
    """The test results of one backend (a way to map memory for K and V)."""

    kv_backend: KVBackend
    missing: str
    """The reason why the backend could not be tested, or "" if it was tested."""
    tests: dict[SelfTest, SelfTestReport] = field(default_factory=dict)
    releases_heaps: bool = True
    """Whether serving returns free memory to the system. A GPU must have passed a test of this."""
    remembered: str = ""
    """The paths of files that record passed tests, or the error of writing such a file."""
    faults: tuple[str, ...] = ()
    """The faults that were on record before these tests."""
    standing_faults: tuple[str, ...] = ()
    """The faults on record after these tests. A backend with such faults is not chosen."""

    @property
    def refusal(self) -> str:
        """Return the reason why serving would refuse this backend, or "" if there is none."""
        return self.missing or self._fault_of(SelfTest.KV_BACKEND)

    @property
    def fault(self) -> str:
        """Return the message of the first failed test, or "" if no test has failed."""
        return self.refusal or self._fault_of(SelfTest.KERNELS) or self._fault_of(SelfTest.STRESS)

    def _fault_of(self, test: SelfTest) -> str:
        return self.tests[test].fault if test in self.tests else ""

    def as_json(self) -> dict[str, Any]:
        tests = {name: self.tests.get(test) for name, test in NAMES_IN_JSON.items()}
        return {
            "name": self.kv_backend.setting,
            "on_gpu": self.kv_backend.on_gpu,
            "works": not self.fault,
            "fault": self.fault,
            "missing": self.missing,
            **{name: report and report.as_json() for name, report in tests.items()},
            "releases_heaps": self.releases_heaps,
            "remembered": self.remembered,
            "faults": list(self.faults),
            "standing_faults": list(self.standing_faults),
        }


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The report of `quire doctor`: the machine, its backends, and the choice of a backend."""

    machine: Machine
    python: str
    extension: Extension
    device: MetalDevice | None
    memory: MachineMemory
    """The memory of the CPU or GPU that would compute."""
    headroom_bytes: int
    kv_backends: tuple[KVBackendReport, ...]
    chosen: KVBackend | None
    """The backend that would serve; None if all backends that the settings allow have failed."""
    reasons: tuple[str, ...]
    maps_while_running: bool | None = None
    """Whether serving would map memory while steps run; None where ``chosen`` is None."""
    wheel: str = ""
    """The tag of the installed wheel of MLX's Metal part, or "" if none is installed."""
    pace: SelfTestReport | None = None
    pressure: str = ""
    """The name of a PressureLevel, in lower case."""
    warnings: tuple[str, ...] = ()

    @property
    def serves(self) -> bool:
        return self.chosen is not None and not self.of(self.chosen).fault

    def of(self, kv_backend: KVBackend) -> KVBackendReport:
        return next(report for report in self.kv_backends if report.kv_backend is kv_backend)

    @property
    def usable_bytes(self) -> int:
        return max(0, self.memory.usable_bytes(self.headroom_bytes))

    def as_json(self) -> dict[str, Any]:
        device, extension, memory = self.device, self.extension, self.memory
        return {
            "schema": SCHEMA,
            "serves": self.serves,
            "machine": self.machine.as_json(),
            "python": self.python,
            "extension": {
                "mlx_installed": extension.mlx_installed,
                "matches": extension.matches,
                "fault": extension.fault,
                **{name: fact for name, fact in extension.facts.items() if name != "metal"},
            },
            "metal": None if device is None else device.said,
            "kv_backends": [report.as_json() for report in self.kv_backends],
            "wheel": self.wheel,
            "pace": None if self.pace is None else self.pace.as_json(),
            "pressure": self.pressure,
            "memory": {
                "total_bytes": memory.total_bytes,
                "available_bytes": memory.available_bytes,
                "max_buffer_bytes": memory.max_buffer_bytes,
                "headroom_bytes": self.headroom_bytes,
                "usable_bytes": self.usable_bytes,
            },
            "choice": {
                "name": None if self.chosen is None else self.chosen.setting,
                "on_gpu": None if self.chosen is None else self.chosen.on_gpu,
                "maps_while_running": self.maps_while_running,
                "reasons": list(self.reasons),
                "warnings": list(self.warnings),
            },
        }


def check_machine(options: SelfTestOptions, progress: Callable[[str], None]) -> MachineReport:
    """Test this machine without a model. Record faults and passed tests on disk, and delete the
    recorded faults of backends that work now. Call ``progress`` with the name of each test."""
    progress("the extension")
    extension = read_extension()
    facts = extension.facts
    device = MetalDevice.of(facts["metal"]) if facts.get("metal") else None
    no_device = "" if device is not None else NO_DEVICE
    no_metal = extension.fault or (no_device if facts["has_metal"] else NO_METAL)
    reports: dict[KVBackend, KVBackendReport] = {}
    for kv_backend in (*ON_METAL, KVBackend.POSIX):
        missing = extension.fault
        if kv_backend.on_gpu:
            missing = no_metal if device is None else "; ".join(device.missing[kv_backend.setting])
        reports[kv_backend] = check_kv_backend(kv_backend, missing, options, progress)
    if options.forget_faults or any(not reports[kv_backend].fault for kv_backend in ON_METAL):
        with suppress(OSError):
            forget_deaths()
    config = options.config
    chosen: KVBackend | None = None
    maps_while_running: bool | None = None
    warnings: tuple[str, ...] = ()
    try:
        choice = choose_kv_backend(
            config.kv_backend,
            no_metal=no_metal,
            trial=lambda kv_backend: reports[kv_backend].refusal,
            remembered=lambda kv_backend: reports[kv_backend].standing_faults,
        )
        choice = choose_mapping(
            choice, config.map_while_running, lambda s: has_passed(SelfTest.STRESS, s)
        )
        chosen, reasons, warnings = choice.kv_backend, choice.reasons, choice.warnings
        maps_while_running = choice.maps_while_running
    except KVBackendError as error:
        reasons = (str(error),)
    memory = machine_memory()
    if chosen is not None and chosen.on_gpu and device is not None:
        memory = gpu_memory(memory, device.working_set_bytes, device.max_buffer_bytes)
    machine, pace = this_machine(), None
    if device is not None:
        if warning := wheel_warning(machine.processor):
            warnings = (*warnings, warning)
        progress("how fast the device is when")
        pace = run_selftest(SelfTest.PACE, KVBackend.PAGED)
    return MachineReport(
        machine=machine,
        python=platform.python_version(),
        extension=extension,
        device=device,
        memory=memory,
        headroom_bytes=memory.headroom_bytes(config.headroom_bytes),
        kv_backends=tuple(reports.values()),
        chosen=chosen,
        maps_while_running=maps_while_running,
        reasons=reasons,
        wheel=wheel_tag(),
        warnings=warnings,
        pace=pace,
        pressure=memory_pressure().name.lower(),
    )


def check_kv_backend(
    kv_backend: KVBackend, missing: str, options: SelfTestOptions, progress: Callable[[str], None]
) -> KVBackendReport:
    """Test a backend as ``check_machine`` does. ``missing`` is the reason not to, or ""."""
    memory = FaultMemory(kv_backend)
    report = KVBackendReport(kv_backend, missing, faults=memory.found())
    if options.forget_faults:
        _forget(memory, kv_backend, stressed=True)
    if not missing:
        _run_tests(report, memory, options, progress)
    report.releases_heaps = not kv_backend.on_gpu or has_passed(SelfTest.RELEASE, kv_backend)
    report.standing_faults = memory.found()
    return report


def _run_tests(
    report: KVBackendReport,
    memory: FaultMemory,
    options: SelfTestOptions,
    progress: Callable[[str], None],
) -> None:
    kv_backend = report.kv_backend
    pages = None if kv_backend.is_dense else options.config.page_bytes
    size = USUAL if kv_backend in (KVBackend.SPARSE, KVBackend.PAGED) else None
    progress(f"{kv_backend}: canary")
    report.tests[SelfTest.KV_BACKEND] = run_selftest(SelfTest.KV_BACKEND, kv_backend, pages, size)
    if report.fault:
        return
    progress(f"{kv_backend}: kernels")
    report.tests[SelfTest.KERNELS] = run_selftest(SelfTest.KERNELS, kv_backend)
    if report.fault:
        return
    # There is no stress test of dense buffers, because nothing is mapped in them.
    _forget(memory, kv_backend, stressed=kv_backend.is_dense)
    if options.stress and not kv_backend.is_dense:
        progress(f"{kv_backend}: mappings under running commands")
        with memory.intent(Act.STRESS):
            stress = run_selftest(SelfTest.STRESS, kv_backend, pages, limit_s=STRESS_LIMIT_S)
        if stress.passed:
            _forget(memory, kv_backend, stressed=True)
        _remember(report, SelfTest.STRESS, stress)
        if stress.fault and kv_backend.on_gpu:
            memory.record(stress.fault, Act.STRESS)
    if options.release_test and kv_backend is not KVBackend.METAL_DENSE and not report.fault:
        progress(f"{kv_backend}: release of heaps")
        with memory.intent(Act.RELEASE_TEST):
            release = run_selftest(SelfTest.RELEASE, kv_backend, pages)
        _remember(report, SelfTest.RELEASE, release)


def _forget(memory: FaultMemory, kv_backend: KVBackend, *, stressed: bool) -> None:
    """Delete the records of a backend's faults and passed tests. Ignore errors of the deletion.
    ``stressed``: see ``FaultMemory.forget``."""
    with suppress(OSError):
        if memory.forget(stressed=stressed):
            for test in (SelfTest.RELEASE, SelfTest.STRESS):
                withdraw_stamp(test, kv_backend)


def _remember(report: KVBackendReport, test: SelfTest, result: SelfTestReport) -> None:
    """Add a test's result to the report. For a GPU, write a file that records a passed test, which
    serving reads. Delete the file if the test has failed."""
    report.tests[test] = result
    if not report.kv_backend.on_gpu:
        return
    try:
        if result.passed:
            outcome = str(write_stamp(test, report.kv_backend))
        else:
            withdraw_stamp(test, report.kv_backend)
            outcome = ""
    except OSError as error:
        outcome = f"it could not be written down: {error}"
    report.remembered = "; ".join(filter(None, (report.remembered, outcome)))


def read_extension() -> Extension:
    installed = installed_mlx()
    outcome = run_child([sys.executable, "-P", "-m", "engine.selftest"], FACTS_LIMIT_S)
    if outcome.fault:
        return Extension(installed, outcome.fault, {})
    try:
        return Extension(installed, "", dict(json.loads(outcome.last_line)))
    except ValueError:
        return Extension(installed, f"it said what cannot be read: {outcome.last_line[:200]!r}", {})


def extension_facts() -> dict[str, Any]:
    """Load the extension; return facts such as versions and limits. Raises ImportError."""
    import metal_ext
    from metal_ext import _ext

    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    # Import MLX after the extension, whose import error explains a mismatch of the versions.
    import mlx.core as mx

    return {
        "mlx_built_for": _ext.MLX_VERSION,
        "has_metal": metal_ext.HAS_METAL,
        "metal": metal_ext.metal_capabilities() if metal_ext.HAS_METAL else {},
        "instruction_sets": metal_ext.instruction_sets(),
        "system_page_bytes": metal_ext.SYSTEM_PAGE_BYTES,
        "matrix_products": "quire's own of few rows, MLX's"
        if metal_ext.HAS_METAL
        else "quire's own",
        "quire": version("quire"),
        "default_device": str(mx.default_device()),
        "open_files": {"soft": soft, "hard": hard, "raised": raise_descriptor_limit()},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(extension_facts()) + "\n")
