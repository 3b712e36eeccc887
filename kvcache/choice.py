"""Which substrate serves on this machine, and why no other one does."""

from collections.abc import Callable
from dataclasses import dataclass

from kvcache.substrates import Substrate

AUTO = "auto"
# Why nothing can be done on a GPU.
NO_METAL = "this build of quire has no Metal"
NO_DEVICE = "this machine has no Metal device"
# The one that shares most comes first; each is tried before it is trusted.
ON_METAL = (Substrate.SPARSE, Substrate.PAGED, Substrate.METAL_DENSE)
ON_CPU = (Substrate.POSIX, Substrate.DENSE)

Trial = Callable[[Substrate], str]
"""What is wrong with a substrate of the GPU on this machine; "" where it works."""


class SubstrateError(ValueError):
    """A substrate that was asked for and that this machine lacks; names what is missing."""


@dataclass(frozen=True, slots=True)
class SubstrateChoice:
    """What serves, and a sentence for each one that was looked at."""

    substrate: Substrate
    reasons: tuple[str, ...]


def choose_substrate(asked: str, *, no_metal: str, trial: Trial) -> SubstrateChoice:
    """asked: "auto", or what a substrate is called.

    no_metal: why nothing can be done on a GPU here, or "". trial: what is wrong with a substrate of
    the GPU, found out by trying it. Raises SubstrateError.
    """
    if asked != AUTO:
        return _as_asked(asked, no_metal, trial)
    if no_metal:
        return SubstrateChoice(Substrate.POSIX, (f"{Substrate.POSIX}: {no_metal}",))
    reasons: list[str] = []
    for substrate in ON_METAL:
        fault = trial(substrate)
        if not fault:
            return SubstrateChoice(substrate, (*reasons, f"{substrate}: it passed its canary"))
        reasons.append(f"not {substrate}: {fault}")
    reasons.append(f"{Substrate.POSIX}: nothing works on this machine's GPU")
    return SubstrateChoice(Substrate.POSIX, tuple(reasons))


def _as_asked(asked: str, no_metal: str, trial: Trial) -> SubstrateChoice:
    named = [s for s in Substrate if s.setting == asked]
    here = [s for s in named if not (s.on_gpu and no_metal)]
    if not named:
        names = ", ".join(dict.fromkeys([AUTO, *(s.setting for s in Substrate)]))
        raise SubstrateError(f"there is no substrate {asked!r}; there are {names}")
    if not here:
        raise SubstrateError(f"{asked} is memory of a GPU: {no_metal}")
    substrate = here[0]
    fault = trial(substrate) if substrate.on_gpu else ""
    if fault:
        raise SubstrateError(f"{substrate} does not work on this machine: {fault}")
    return SubstrateChoice(substrate, (f"{substrate}: as configured",))
