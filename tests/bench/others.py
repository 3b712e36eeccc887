"""How much of the processors others take while servers are compared: what a figure is worth."""

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

CALM_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Busy:
    """Processor time so far. Seconds."""

    at_s: float
    machine_s: float
    """Of all cores: of every process, of interrupts, and what the hypervisor gave to others."""
    ours_s: float
    """Of this process and of all that it has started and that still run."""

    @classmethod
    def now(cls) -> "Busy":
        """As the system counts it: in hundredths of a second."""
        times = psutil.cpu_times()._asdict()
        # The time of guests is in user and nice already.
        idle = sum(times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        this = psutil.Process()
        ours_s = 0.0
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                ours_s += sum(process.cpu_times()[:2])
        return cls(time.monotonic(), sum(times.values()) - idle, ours_s)

    def others_since(self, before: "Busy") -> float:
        """How many cores others took, on average."""
        others_s = (self.machine_s - before.machine_s) - (self.ours_s - before.ours_s)
        return max(0.0, others_s / (self.at_s - before.at_s))


def others_text(cores: float) -> str:
    """cores: the most that others ever took."""
    advice = "" if cores <= CALM_CORES else ": NOT CALM, run it again"
    return f"at most {100 * cores:.0f} % of one core{advice}"
