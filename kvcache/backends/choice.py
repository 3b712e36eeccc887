"""KV backends, which are kinds of memory for K and V, and the choice of one for this machine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class KVBackend(Enum):
    """A KV backend (kind of memory for K and V), as ``(name in settings, True if on a GPU)``."""

    SPARSE = ("sparse", True)
    """Sparse buffers of Metal: memory pages are mapped in address ranges of the GPU."""
    PAGED = ("paged", True)
    """Ordinary buffers of Metal, with a page table that the GPU's kernels read."""
    METAL_DENSE = ("dense", True)
    """One buffer of Metal, of which every sequence gets a slice."""
    POSIX = ("posix", False)
    """Shared memory of the system, whose pages are mapped at reserved addresses of the CPU."""

    @property
    def setting(self) -> str:
        return self.value[0]

    @property
    def on_gpu(self) -> bool:
        return self.value[1]

    @property
    def is_dense(self) -> bool:
        """True if a block holds a whole context, so that sequences cannot share blocks."""
        return self.setting == "dense"

    def __str__(self) -> str:
        return f"{self.setting} on Metal" if self.on_gpu else self.setting


AUTO = "auto"
NO_METAL = "this build of quire has no Metal"
NO_DEVICE = "this machine has no Metal device"
NOTHING_WORKS = "nothing works on this machine's GPU, and its CPU is many times slower"
# In order of preference: a backend that lets sequences share more memory comes earlier.
ON_METAL = (KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE)

# The bits of a GPU's addresses in one process, before the family apple9 (M1, M2) and since (Asahi
# Linux's driver, drm/asahi/mmu.rs and hw/).
EARLY_ADDRESS_BITS, ADDRESS_BITS = 39, 42
FIRST_WIDE_FAMILY = "apple9"

Trial = Callable[[KVBackend], str]
"""Tests a GPU's KV backend on this machine. Returns a description of its fault, or ""."""
Remembered = Callable[[KVBackend], tuple[str, ...]]
"""Returns the faults of a GPU's KV backend that kvcache/backends/faults.py has stored."""


class KVBackendError(ValueError):
    """The settings name a KV backend that does not work here. The message has the reason."""


@dataclass(frozen=True, slots=True)
class KVBackendChoice:
    """The chosen backend, and a sentence about each backend that was considered."""

    kv_backend: KVBackend
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """Those of the reasons that call for action by the user."""
    maps_while_running: bool = True
    """True if mappings may change while steps run, False if only between steps."""
    releases_heaps: bool = False
    """True if a GPU's heaps may be released before the process ends."""


def choose_kv_backend(
    setting: str, *, no_metal: str, trial: Trial, remembered: Remembered
) -> KVBackendChoice:
    """Choose the KV backend by ``setting``, which is "auto" or a backend's name. ``no_metal`` is
    the reason that no GPU can be used, or "". A backend with stored faults is never tried, because
    a server that starts at boot would crash the machine again and again. Raises KVBackendError if
    the setting cannot be followed."""
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
    """Choose whether to change mappings of sparse buffers while steps run. That needs a passed
    stress test. ``setting`` is ``cache.map_while_running``. Raises KVBackendError."""
    backend = choice.kv_backend
    if backend is not KVBackend.SPARSE:
        return choice
    passed = stress_passed(backend)
    bold = _is_trusted(backend, "map_while_running", setting, "stress", "--stress", passed)
    tested = f"its stress test has {'' if passed else 'not '}passed here"
    why = "as configured" if setting is False else tested
    reason = f"memory is mapped {'while steps run' if bold else 'between steps'}: {why}"
    return replace(choice, reasons=(*choice.reasons, reason), maps_while_running=bold)


def choose_release(
    choice: KVBackendChoice, setting: bool | None, release_passed: Callable[[KVBackend], bool]
) -> KVBackendChoice:
    """Choose whether to release heaps of a GPU. That needs a passed release test. ``setting`` is
    ``cache.release_heaps``. Raises KVBackendError."""
    backend = choice.kv_backend
    if not backend.on_gpu:
        return choice
    passed = release_passed(backend)
    released = _is_trusted(backend, "release_heaps", setting, "release", "--release-test", passed)
    return replace(choice, releases_heaps=released)


def _is_trusted(
    backend: KVBackend, name: str, setting: bool | None, test: str, flag: str, passed: bool
) -> bool:
    """Return True if a feature that needs a passed self-test may be used. ``flag`` is the test's
    option of ``quire doctor``. Raises KVBackendError if the setting is True without a passed
    test."""
    if setting and not passed:
        raise KVBackendError(
            f"cache.{name} is set, but the {test} test of {backend} has not passed on this "
            f"machine with this system: run `quire doctor {flag}`, or leave it out"
        )
    return passed and setting is not False


def _in_doubt(faults: tuple[str, ...]) -> str:
    return (
        f"it has failed on this machine with this system and this MLX: {'; '.join(faults)}. "
        "`quire doctor --stress` tries it again, and forgets this where it passes"
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
    """The default Metal device, as ``metal_ext.metal_capabilities`` describes it."""

    name: str
    working_set_bytes: int
    """The most memory that the driver recommends for one process."""
    max_buffer_bytes: int
    """The size of the largest allocation."""
    said: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The features that the device lacks, by the name of the KV backend that needs them."""

    @property
    def address_bytes(self) -> int:
        is_wide = FIRST_WIDE_FAMILY in self.said.get("families", ())
        return 1 << (ADDRESS_BITS if is_wide else EARLY_ADDRESS_BITS)

    @classmethod
    def of(cls, capabilities: dict[str, Any]) -> "MetalDevice":
        return cls(
            capabilities["name"],
            capabilities["recommended_working_set_bytes"],
            capabilities["max_buffer_bytes"],
            capabilities,
            {s.setting: tuple(capabilities[f"missing_for_{s.setting}"]) for s in ON_METAL},
        )
