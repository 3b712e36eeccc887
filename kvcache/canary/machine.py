"""What a test that has passed is true of: this model of machine with this system and this MLX."""

import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
SYSCTL = "/usr/sbin/sysctl"


@dataclass(frozen=True, slots=True)
class Machine:
    """Names, for people and as a key; none that tells one machine from its like."""

    model: str
    processor: str
    system: str
    """With its version, and on a Mac its build."""
    mlx: str

    def as_json(self) -> dict[str, str]:
        """The same, of JSON's own types."""
        return asdict(self)


def this_machine() -> Machine:
    """This one."""
    mlx = installed_mlx()
    if sys.platform != "darwin":
        system = f"{platform.system()} {platform.release()}"
        return Machine(platform.machine(), _linux_processor(), system, mlx)
    model, processor, build = (
        _sysctl(name) for name in ("hw.model", "machdep.cpu.brand_string", "kern.osversion")
    )
    return Machine(model, processor, f"macOS {platform.mac_ver()[0]} ({build})", mlx)


def installed_mlx() -> str:
    """The version of MLX, which need not be one that works."""
    try:
        return importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sysctl(name: str) -> str:
    done = subprocess.run([SYSCTL, "-n", name], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _linux_processor() -> str:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
