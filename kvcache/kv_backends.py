"""The kinds of memory for K and V, and the choice of one for this machine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class KVBackend(Enum):
    """A kind of memory for K and V: its name in settings, and whether it is a GPU's memory."""

    SPARSE = ("sparse", True)
    """Placement sparse buffers: pages mapped at addresses of the GPU."""
    PAGED = ("paged", True)
    """Ordinary buffers, and a page table that the kernels read."""
    METAL_DENSE = ("dense", True)
    """One buffer of the GPU with a slice for every sequence."""
    POSIX = ("posix", False)
    """Pages of shared memory mapped at reserved addresses."""

    @property
    def setting(self) -> str:
        return self.value[0]

    @property
    def on_gpu(self) -> bool:
        return self.value[1]

    @property
    def is_dense(self) -> bool:
        """Whether one block is a whole context, so that sequences cannot share blocks."""
        return self.setting == "dense"

    def __str__(self) -> str:
        return f"{self.setting} on Metal" if self.on_gpu else self.setting


AUTO = "auto"
NO_METAL = "this build of quire has no Metal"
NO_DEVICE = "this machine has no Metal device"
NOTHING_WORKS = "nothing works on this machine's GPU, and its CPU is many times slower"
# In order of preference: the backend that shares most memory comes first.
ON_METAL = (KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE)

Trial = Callable[[KVBackend], str]
"""Tests a GPU's backend on this machine; returns its fault, or "" if it works."""
Remembered = Callable[[KVBackend], tuple[str, ...]]
"""Returns the faults that kvcache/fault_memory.py remembers of a GPU's backend."""


class KVBackendError(ValueError):
    """The settings name a backend that this machine lacks; the message names the reason."""


@dataclass(frozen=True, slots=True)
class KVBackendChoice:
    """The chosen backend, and a sentence about each backend that was considered."""

    kv_backend: KVBackend
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """The sentences that a person should act on."""
    maps_while_running: bool = True
    """Whether mappings change while steps run, or only between steps."""
    releases_heaps: bool = False
    """Whether a GPU's heaps are released before the process ends."""


def choose_kv_backend(
    setting: str, *, no_metal: str, trial: Trial, remembered: Remembered
) -> KVBackendChoice:
    """Choose the backend. setting: "auto" or a name. no_metal: why no GPU can compute, or "".

    A backend with remembered faults is never tried, so that a server started at boot does not
    crash the machine again and again. Raises KVBackendError if the setting cannot be followed."""
    if setting != AUTO:
        return _configured(setting, no_metal, trial, remembered)
    if no_metal:
        return KVBackendChoice(KVBackend.POSIX, (f"{KVBackend.POSIX}: {no_metal}",))
    reasons: list[str] = []
    warnings: list[str] = []
    for backend in ON_METAL:
        if faults := remembered(backend):
            warnings.append(f"not {backend}: {_in_doubt(faults)}")
            reasons.append(warnings[-1])
        elif fault := trial(backend):
            reasons.append(f"not {backend}: {fault}")
        else:
            reasons.append(f"{backend}: it passed its canary")
            return KVBackendChoice(backend, tuple(reasons), tuple(warnings))
    warnings.append(f"{KVBackend.POSIX}: {NOTHING_WORKS}")
    return KVBackendChoice(KVBackend.POSIX, (*reasons, warnings[-1]), tuple(warnings))


def choose_mapping(
    choice: KVBackendChoice, setting: bool | None, stress_passed: Callable[[KVBackend], bool]
) -> KVBackendChoice:
    """Decide when mappings of sparse buffers change: while steps run only if the stress test has
    passed on this machine. setting: ``cache.map_while_running``. Raises KVBackendError."""
    backend = choice.kv_backend
    if backend is not KVBackend.SPARSE:
        return choice
    passed = stress_passed(backend)
    bold = _is_trusted(backend, "map_while_running", setting, "stress", "--stress", passed)
    if setting is False:
        why = "as configured"
    else:
        why = f"its stress test has {'' if passed else 'not '}passed here"
    when = "while steps run" if bold else "between steps"
    reason = f"memory is mapped {when}: {why}"
    return replace(choice, reasons=(*choice.reasons, reason), maps_while_running=bold)


def choose_release(
    choice: KVBackendChoice, setting: bool | None, release_passed: Callable[[KVBackend], bool]
) -> KVBackendChoice:
    """Decide whether a GPU's heaps are released: only if the release test has passed on this
    machine. setting: ``cache.release_heaps``. Raises KVBackendError."""
    backend = choice.kv_backend
    if not backend.on_gpu:
        return choice
    passed = release_passed(backend)
    released = _is_trusted(backend, "release_heaps", setting, "release", "--release-test", passed)
    return replace(choice, releases_heaps=released)


def _is_trusted(
    backend: KVBackend, name: str, setting: bool | None, test: str, flag: str, passed: bool
) -> bool:
    """Return whether a GPU may do what needs a passed self-test. flag: the doctor's option for the
    test. Raises KVBackendError if the setting is true but the test has not passed."""
    if setting and not passed:
        raise KVBackendError(
            f"cache.{name} is set, but the {test} test of {backend} has not passed on this "
            f"machine with this system: run `quire doctor {flag}`, or leave it out"
        )
    return passed and setting is not False


def _in_doubt(faults: tuple[str, ...]) -> str:
    return (
        f"it has failed on this machine with this system and this MLX: {'; '.join(faults)}. "
        "`quire doctor` tries it again, and forgets this where it passes"
    )


def _configured(
    setting: str, no_metal: str, trial: Trial, remembered: Remembered
) -> KVBackendChoice:
    backend = next((s for s in KVBackend if s.setting == setting), None)
    if backend is None:
        names = ", ".join([AUTO, *(s.setting for s in KVBackend)])
        raise KVBackendError(f"there is no backend {setting!r}; there are {names}")
    if backend.on_gpu and no_metal:
        raise KVBackendError(f"{setting} is memory of a GPU: {no_metal}")
    if backend.on_gpu and (faults := remembered(backend)):
        raise KVBackendError(
            f"{backend} is asked for, but {_in_doubt(faults)}; --kv-backend auto takes another"
        )
    if backend.on_gpu and (fault := trial(backend)):
        raise KVBackendError(f"{backend} does not work on this machine: {fault}")
    return KVBackendChoice(backend, (f"{backend}: as configured",))


@dataclass(frozen=True, slots=True)
class MetalDevice:
    """The default Metal device, from ``metal_ext.metal_capabilities``."""

    name: str
    working_set_bytes: int
    """The most memory that the driver recommends for a process."""
    max_buffer_bytes: int
    """The size of the largest allocation."""
    said: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The features that the device lacks, by the name of the backend that needs them."""

    @classmethod
    def of(cls, capabilities: dict[str, Any]) -> "MetalDevice":
        return cls(
            capabilities["name"],
            capabilities["recommended_working_set_bytes"],
            capabilities["max_buffer_bytes"],
            capabilities,
            {s.setting: tuple(capabilities[f"missing_for_{s.setting}"]) for s in ON_METAL},
        )
