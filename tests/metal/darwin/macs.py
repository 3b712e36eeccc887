"""Macs in use, by the figures that programs are told."""

from dataclasses import dataclass, replace
from pathlib import Path

GIB = 1024**3
# Of a Mac with 24 GiB in use, as vm_stat had it (pull request 4876 of HMCL-dev/HMCL): free and
# inactive pages, which psutil calls available, are 0.30 of the memory. One with 8 GiB had 0.26
# (issue 1503 of giampaolo/psutil).
AVAILABLE_RATIO = 0.30
PAGE_BYTES = 16384
NORMAL, WARNING = 1, 2
"""kern.memorystatus_vm_pressure_level."""
MAX_FILES = 10240
"""kern.maxfilesperproc. Larger Macs have more; few is the harder case."""
SHELL_LIMIT = 4096
"""Of open files, in shells whose users have set one."""
NO_RESIDENCY_SETS = "MTLDevice newResidencySetWithDescriptor:error:"


@dataclass(frozen=True, slots=True)
class Mac:
    """A machine with its programs open."""

    memory_gib: int
    pressure: int = NORMAL
    hard_limit: int = MAX_FILES
    """Of open files. As many as kern.maxfilesperproc are told as infinite: a Mac's default."""
    lacks: str = ""
    """What its device does not answer."""
    saves_power: bool = False
    """Whether it is in its low power mode."""

    def __str__(self) -> str:
        return f"{self.memory_gib} GB, macOS {14 if self.lacks else 26}"

    @property
    def available_gib(self) -> float:
        """What psutil calls available. macOS keeps it small."""
        return self.memory_gib * AVAILABLE_RATIO

    @property
    def working_set_bytes(self) -> int:
        """recommendedMaxWorkingSetSize of machines below 36 GB: two thirds."""
        return self.memory_gib * GIB * 2 // 3 // PAGE_BYTES * PAGE_BYTES

    def on_macos_14(self) -> "Mac":
        """Without sparse buffers."""
        return replace(self, lacks=NO_RESIDENCY_SETS)

    def with_limit(self, files: int) -> "Mac":
        """In a shell with a hard limit of open files."""
        return replace(self, hard_limit=files)

    def told(self, folder: Path) -> Path:
        """The folder in which its figures are, as system.c and personality.py read them."""
        available = int(self.available_gib * GIB)
        figures = {
            "sysctl/hw.memsize": self.memory_gib * GIB,
            "sysctl/hw.model": "Mac14,2",
            "sysctl/machdep.cpu.brand_string": "Apple M2",
            "sysctl/kern.osversion": "25B78",
            "sysctl/kern.maxfilesperproc": MAX_FILES,
            "sysctl/kern.memorystatus_vm_pressure_level": self.pressure,
            "memory/available": available,
            "memory/free": available // 8,
            "gpu/recommended_working_set_bytes": self.working_set_bytes,
            "gpu/max_buffer_bytes": self.working_set_bytes * 5 // 6,
            "lacks": self.lacks,
            "power/assertions": "",
            "power/settings": f"Currently in use:\n lowpowermode {int(self.saves_power)}\n",
            "mistakes": "",
        }
        for name, figure in figures.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(str(figure))
        return folder


MACS = (Mac(8, WARNING), Mac(16, WARNING), Mac(24))
