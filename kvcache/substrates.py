"""What can stand under K and V, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum


class Substrate(Enum):
    """The name that settings use, and whether it is memory of the GPU."""

    SPARSE = ("sparse", True)
    """Placement sparse buffers: pages mapped behind addresses of the GPU."""
    PAGED = ("paged", True)
    """Ordinary buffers, and a page table that the kernels read."""
    METAL_DENSE = ("dense", True)
    """One buffer, of which every sequence has a slice."""
    POSIX = ("posix", False)
    """Pages of shared memory mapped behind reserved addresses."""

    @property
    def setting(self) -> str:
        """What a person calls it."""
        return self.value[0]

    @property
    def on_gpu(self) -> bool:
        """Whether MLX must compute on the GPU."""
        return self.value[1]

    @property
    def is_dense(self) -> bool:
        """Whether a block is a whole context, and nothing is shared."""
        return self.setting == "dense"

    def __str__(self) -> str:
        return f"{self.setting} on Metal" if self.on_gpu else self.setting


AUTO = "auto"
# Why nothing can be done on a GPU.
NO_METAL = "this build of quire has no Metal"
NO_DEVICE = "this machine has no Metal device"
NOTHING_WORKS = "nothing works on this machine's GPU, and its CPU is many times slower"
# The one that shares most comes first; each is tried before it is trusted.
ON_METAL = (Substrate.SPARSE, Substrate.PAGED, Substrate.METAL_DENSE)

Trial = Callable[[Substrate], str]
"""What is wrong with a substrate of the GPU on this machine; "" where it works."""
Remembered = Callable[[Substrate], tuple[str, ...]]
"""The faults that a substrate of the GPU has had on this machine (``kvcache/fault_memory.py``)."""


class SubstrateError(ValueError):
    """A substrate that was asked for and that this machine lacks; names what is missing."""


@dataclass(frozen=True, slots=True)
class SubstrateChoice:
    """What serves, and a sentence for each one that was looked at."""

    substrate: Substrate
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """Those of the reasons that somebody should do something about."""
    maps_while_running: bool = True
    """Whether memory is mapped and unmapped while steps run; else between them."""
    releases_heaps: bool = False
    """Whether a GPU's heaps go back to the system before the process ends."""


def choose_substrate(
    asked: str, *, no_metal: str, trial: Trial, remembered: Remembered
) -> SubstrateChoice:
    """asked: "auto", or what a substrate is called.

    no_metal: why nothing can be done on a GPU here, or "". trial: what is wrong with a substrate of
    the GPU, found out by trying it. remembered: what it has done before: then it is not even tried,
    and refused where it is asked for, because a machine that comes up with a server of its own must
    not go down with it again and again. Raises SubstrateError.
    """
    if asked != AUTO:
        return _as_asked(asked, no_metal, trial, remembered)
    if no_metal:
        return SubstrateChoice(Substrate.POSIX, (f"{Substrate.POSIX}: {no_metal}",))
    reasons: list[str] = []
    warnings: list[str] = []
    for substrate in ON_METAL:
        if faults := remembered(substrate):
            warnings.append(f"not {substrate}: {_in_doubt(faults)}")
            reasons.append(warnings[-1])
        elif fault := trial(substrate):
            reasons.append(f"not {substrate}: {fault}")
        else:
            reasons.append(f"{substrate}: it passed its canary")
            return SubstrateChoice(substrate, tuple(reasons), tuple(warnings))
    warnings.append(f"{Substrate.POSIX}: {NOTHING_WORKS}")
    return SubstrateChoice(Substrate.POSIX, (*reasons, warnings[-1]), tuple(warnings))


def choose_mapping(
    choice: SubstrateChoice, asked: bool | None, stress_passed: Callable[[Substrate], bool]
) -> SubstrateChoice:
    """Say when the chosen substrate maps memory: sparse buffers while steps run only where this
    machine has borne it; everything else at any time.

    asked: ``cache.map_while_running``. stress_passed: whether a substrate's stress test has passed
    here. Raises SubstrateError.
    """
    substrate = choice.substrate
    if substrate is not Substrate.SPARSE:
        return choice
    passed = stress_passed(substrate)
    bold = _is_trusted(substrate, "map_while_running", asked, "stress", "--stress", passed)
    if asked is False:
        why = "as configured"
    else:
        why = f"its stress test has {'' if passed else 'not '}passed here"
    when = "while steps run" if bold else "between steps"
    said = f"memory is mapped {when}: {why}"
    return replace(choice, reasons=(*choice.reasons, said), maps_while_running=bold)


def choose_release(
    choice: SubstrateChoice, asked: bool | None, release_passed: Callable[[Substrate], bool]
) -> SubstrateChoice:
    """Say whether the chosen substrate releases heaps: a GPU's only where this machine has borne
    it.

    asked: ``cache.release_heaps``. release_passed: whether a substrate's release test has passed
    here. Raises SubstrateError.
    """
    substrate = choice.substrate
    if not substrate.on_gpu:
        return choice
    passed = release_passed(substrate)
    released = _is_trusted(substrate, "release_heaps", asked, "release", "--release-test", passed)
    return replace(choice, releases_heaps=released)


def _is_trusted(
    substrate: Substrate, setting: str, asked: bool | None, test: str, flag: str, passed: bool
) -> bool:
    """Return whether a GPU does what it can only be trusted with where a test has passed. asked:
    the setting's value. flag: runs the test. Raises SubstrateError where the setting is true and
    the test has not passed."""
    if asked and not passed:
        raise SubstrateError(
            f"cache.{setting} is set, but the {test} test of {substrate} has not passed on this "
            f"machine with this system: run `quire doctor {flag}`, or leave it out"
        )
    return passed and asked is not False


def _in_doubt(faults: tuple[str, ...]) -> str:
    return (
        f"it has failed on this machine with this system and this MLX: {'; '.join(faults)}. "
        "`quire doctor` tries it again, and forgets this where it passes"
    )


def _as_asked(asked: str, no_metal: str, trial: Trial, remembered: Remembered) -> SubstrateChoice:
    named = [s for s in Substrate if s.setting == asked]
    here = [s for s in named if not (s.on_gpu and no_metal)]
    if not named:
        names = ", ".join(dict.fromkeys([AUTO, *(s.setting for s in Substrate)]))
        raise SubstrateError(f"there is no substrate {asked!r}; there are {names}")
    if not here:
        raise SubstrateError(f"{asked} is memory of a GPU: {no_metal}")
    substrate = here[0]
    if substrate.on_gpu and (faults := remembered(substrate)):
        raise SubstrateError(
            f"{substrate} is asked for, but {_in_doubt(faults)}; --kv-backend auto takes another"
        )
    fault = trial(substrate) if substrate.on_gpu else ""
    if fault:
        raise SubstrateError(f"{substrate} does not work on this machine: {fault}")
    return SubstrateChoice(substrate, (f"{substrate}: as configured",))


@dataclass(frozen=True, slots=True)
class MetalDevice:
    """The default device. Sizes in bytes."""

    name: str
    working_set_bytes: int
    """Memory that the driver recommends a process to use at most."""
    max_buffer_bytes: int
    """The largest allocation."""
    said: dict[str, bool | int | str | list[str]] = field(default_factory=dict)
    """All that it says, for people."""
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By substrate, what the device lacks for it."""

    @classmethod
    def of(cls, said: dict[str, bool | int | str | list[str]]) -> "MetalDevice":
        """said: what ``metal_ext.metal_capabilities`` gives where there is a device."""
        missing: dict[str, tuple[str, ...]] = {}
        for kind in (Substrate.SPARSE, Substrate.PAGED, Substrate.METAL_DENSE):
            lacks = said[f"missing_for_{kind.setting}"]
            assert isinstance(lacks, list)
            missing[kind.setting] = tuple(lacks)
        return cls(
            name=str(said["name"]),
            working_set_bytes=_number(said, "recommended_working_set_bytes"),
            max_buffer_bytes=_number(said, "max_buffer_bytes"),
            said=said,
            missing=missing,
        )


def _number(said: dict[str, bool | int | str | list[str]], name: str) -> int:
    value = said[name]
    assert isinstance(value, int)
    return value
