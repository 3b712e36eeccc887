"""What the doctor found, as it is printed and as JSON."""

from dataclasses import dataclass
from typing import Any

from engine.machine import MachineMemory
from kvcache.canary.machine import Machine
from kvcache.canary.report import TrialReport
from kvcache.substrates import MetalDevice
from kvcache.substrates import Substrate

# Rises when a field changes its meaning or goes.
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Extension:
    """The native extension, and the MLX that it must fit."""

    mlx_installed: str
    fault: str
    """Why it cannot be loaded; "" where it can."""
    said: dict[str, Any]
    """Its facts; empty where it cannot be loaded."""

    @property
    def matches(self) -> bool:
        """Return whether it was built for the MLX that is installed."""
        return self.said.get("mlx_built_for") == self.mlx_installed


@dataclass(frozen=True, slots=True)
class Examination:
    """One substrate. A trial is None where it was not made."""

    substrate: Substrate
    missing: str
    """Why it could not be tried; "" where it was."""
    canary: TrialReport | None = None
    kernels: TrialReport | None = None
    release: TrialReport | None = None
    stress: TrialReport | None = None
    releases_heaps: bool = True
    """Whether heaps may be given back: on a GPU where the release test has passed once."""
    remembered: str = ""
    """Where passed tests were written down, or why they could not be."""
    faults: tuple[str, ...] = ()
    """What it had done here before it was examined."""
    standing_faults: tuple[str, ...] = ()
    """What keeps it from being chosen: those that were not forgotten, and new ones."""

    @property
    def refusal(self) -> str:
        """Return why it would not be chosen; "" where it could be. What serving asks, and no
        more."""
        return self.missing or (self.canary.fault if self.canary is not None else "")

    @property
    def fault(self) -> str:
        """Return what speaks against it, its arithmetic included; "" when nothing does."""
        wrong = self.kernels.fault if self.kernels is not None else ""
        stressed = self.stress.fault if self.stress is not None else ""
        return self.refusal or wrong or stressed

    def as_json(self) -> dict[str, Any]:
        """Return the same, of JSON's own types."""
        return {
            "name": self.substrate.setting,
            "on_gpu": self.substrate.on_gpu,
            "works": not self.fault,
            "fault": self.fault,
            "missing": self.missing,
            **{
                name: None if trial is None else trial.as_json()
                for name, trial in (
                    ("canary", self.canary),
                    ("kernels", self.kernels),
                    ("release_test", self.release),
                    ("stress_test", self.stress),
                )
            },
            "releases_heaps": self.releases_heaps,
            "remembered": self.remembered,
            "faults": list(self.faults),
            "standing_faults": list(self.standing_faults),
        }


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All of it."""

    machine: Machine
    python: str
    extension: Extension
    device: MetalDevice | None
    memory: MachineMemory
    """Of the processor that would compute."""
    headroom_bytes: int
    examinations: tuple[Examination, ...]
    chosen: Substrate | None
    """What would serve; None where nothing could, or not what was asked for."""
    reasons: tuple[str, ...]
    maps_while_running: bool | None = None
    """Whether serving would map memory while steps run; None where nothing is chosen."""
    wheel: str = ""
    """The tag of MLX's Metal side; "" where it is not installed."""
    wheel_warning: str = ""
    pace: TrialReport | None = None
    pressure: str = ""
    """How short of memory the system was, in its own word."""
    warnings: tuple[str, ...] = ()
    """What somebody should do something about, although something can serve."""

    @property
    def serves(self) -> bool:
        """Return whether something can serve."""
        return self.chosen is not None and not self.of(self.chosen).fault

    def of(self, substrate: Substrate) -> Examination:
        """Return what was found out about one."""
        return next(each for each in self.examinations if each.substrate is substrate)

    @property
    def usable_bytes(self) -> int:
        """Return what weights, activations and K and V may have together."""
        return max(0, self.memory.usable_bytes(self.headroom_bytes))

    def as_json(self) -> dict[str, Any]:
        """Return one object; ``SCHEMA`` says what its fields mean."""
        device = self.device
        return {
            "schema": SCHEMA,
            "serves": self.serves,
            "machine": self.machine.as_json(),
            "python": self.python,
            "extension": {
                "mlx_installed": self.extension.mlx_installed,
                "matches": self.extension.matches,
                "fault": self.extension.fault,
                **{name: fact for name, fact in self.extension.said.items() if name != "metal"},
            },
            "metal": None if device is None else device.said,
            "substrates": [each.as_json() for each in self.examinations],
            "wheel": self.wheel,
            "pace": None if self.pace is None else self.pace.as_json(),
            "pressure": self.pressure,
            "memory": {
                "total_bytes": self.memory.total_bytes,
                "available_bytes": self.memory.available_bytes,
                "max_buffer_bytes": self.memory.max_buffer_bytes,
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
