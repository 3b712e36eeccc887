"""Run gates side by side: `python -m tests.gates landing`, `nightly`, or gates by their names.

Needs nothing but Python, and builds the rest. The output of a gate goes to build/gates, and is
shown when the gate ends. Every gate runs, whatever failed before it; the last lines are the times.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build/gates"
PYTHON = ".venv/bin/python -m"
# Of the output of a gate that passed.
SHOWN_LINES = 12
POLL_S = 0.2
# Of the environment: a make that runs this one does not share its jobs, and interpreters keep what
# they have compiled.
DROPPED = ("MAKE", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True)
class Gate:
    """A command of the shell, run where the checkout is. cores: how many of two it fills; 0 where
    it mostly waits. after: gates whose builds it uses, or which must not run beside it; it also
    waits for those that stand before it and fill the cores that it needs. limit_min: a gate that
    takes longer hangs."""

    name: str
    command: str
    cores: int = 1
    after: tuple[str, ...] = ("setup",)
    limit_min: int = 20


SETUP = Gate("setup", "make .venv/.dev", after=())
LANDING = (
    SETUP,
    Gate("native", "make -C tests/native sanitized", after=()),
    Gate("metal-lint", "make -C tests/metal lint"),
    Gate("mac-wheels", "make -C tests/metal mac-wheels"),
    # It takes 21 minutes on a slow machine of two processors, and does not hang.
    Gate("test", "make test", cores=2, limit_min=45),
    # Tests fill more than two processors.
    Gate("page", "make page", cores=0, after=("test",)),
    Gate(
        "metal-kernels",
        "make -C tests/metal kernels-plain kernels-asan kernels-races",
        after=("metal-lint",),
    ),
    Gate("metal-core", "make -C tests/metal/core run-asan", after=("metal-lint", "mac-wheels")),
    Gate(
        "metal-graph",
        "make -C tests/metal graph ARGUMENTS='-k \"not doctor and not nightly\"'",
        after=("metal-kernels", "mac-wheels"),
    ),
    Gate("metal-darwin", "make -C tests/metal darwin", after=("metal-graph",)),
    Gate("clients", "make clients BODIES='--examples 12' AGENTS='messages responses'"),
    Gate("fuzz", f"{PYTHON} tests.fuzz --minutes 1"),
    Gate("soak", f"{PYTHON} tests.abuse.soak --requests 400"),
)
NIGHTLY = (
    SETUP,
    Gate("tools", "make test-tools", cores=2),
    Gate("metal-lint", "make -C tests/metal lint"),
    Gate("mac-wheels", "make -C tests/metal mac-wheels"),
    Gate("metal-kernels-all", "make -C tests/metal kernels", after=("metal-lint",), limit_min=60),
    Gate(
        "metal-core-all",
        "make -C tests/metal core",
        after=("metal-lint", "mac-wheels"),
        limit_min=60,
    ),
    Gate(
        "metal-graph-all",
        "make -C tests/metal graph",
        after=("metal-kernels-all", "mac-wheels"),
        limit_min=60,
    ),
    Gate("metal-cross", "make -C tests/metal cross", after=("mac-wheels",)),
    Gate("native-plain", "make -C tests/native plain"),
    Gate("arm64", "make -C tests/native arm64"),
    Gate("simulate", f"{PYTHON} tests.simulation"),
    Gate("simulate-planted", f"{PYTHON} tests.planted simulation", cores=2, limit_min=60),
    Gate("schedules", "make schedules"),
    Gate("parity", "make parity"),
    Gate("structured", f"{PYTHON} tests.structured", limit_min=60),
    Gate("soak-all", "make soak"),
    Gate("fuzz-all", f"{PYTHON} tests.fuzz --minutes 10"),
    Gate("clients-all", "make clients"),
    Gate(
        "clients-several",
        f"{PYTHON} tests.clients --several anthropic_npm ollama_python openai_npm",
    ),
    Gate("docker", "make -C tests/docker boards"),
    Gate("docker-root", "make -C tests/docker root", limit_min=60),
    Gate("sdist", "make -C tests/install sdist"),
    Gate("wheels", "make -C tests/install wheels PYTHONS=3.11 MACHINES=x86_64", limit_min=60),
    Gate("wheel-root", "make -C tests/install roots", after=("wheels",), limit_min=60),
    Gate("abuse-crowd", f"{PYTHON} tests.abuse.crowd", cores=2),
    Gate("abuse-soak", f"{PYTHON} tests.abuse.soak --minutes 30", cores=2, limit_min=60),
    Gate("abuse-costs", f"{PYTHON} tests.abuse.costs", cores=2),
    Gate("swaps", f"{PYTHON} tests.abuse.swaps", cores=2, limit_min=60),
    Gate("bench", f"{PYTHON} tests.bench --quick", cores=2),
    # The last one: it installs Ray into .venv.
    Gate("cluster", f"make .venv/.cluster && {PYTHON} tests.cluster", cores=2),
)
TIERS = {"landing": LANDING, "nightly": NIGHTLY}
GATES = {gate.name: gate for gate in (*LANDING, *NIGHTLY)}


class Run:
    """A gate that runs, in a process group of its own."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.log = LOGS / f"{gate.name}.log"
        self._start = time.monotonic()
        env = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                ("bash", "-c", gate.command),
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> int:
        return round(time.monotonic() - self._start)

    def has_ended(self) -> bool:
        """Return whether it has ended; kill it when it takes too long."""
        if self._process.poll() is None and self.seconds > self.gate.limit_min * 60:
            self.kill()
        return self._process.poll() is not None

    @property
    def passed(self) -> bool:
        return self._process.returncode == 0

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def next_gate(waiting: Sequence[Gate], running: Collection[Gate], cores: int) -> Gate | None:
    """Return the first gate whose builds are there, if it has processors; None otherwise: later
    gates would keep it waiting."""
    unfinished = {gate.name for gate in (*waiting, *running)}
    for gate in waiting:
        if not unfinished & set(gate.after):
            fits = sum(other.cores for other in running) + gate.cores <= cores
            return gate if fits or not running else None
    return None


def run_all(gates: Sequence[Gate], stops: Collection[int] = (), cores: int = 2) -> Iterator[Run]:
    """Run the gates; yield each as it ends. stops: signals that came; with one, all are killed."""
    waiting, running = list(gates), list[Run]()
    try:
        while (waiting or running) and not stops:
            while gate := next_gate(waiting, [run.gate for run in running], cores):
                waiting.remove(gate)
                running.append(Run(gate))
            for run in [run for run in running if run.has_ended()]:
                running.remove(run)
                yield run
            time.sleep(POLL_S)
    finally:
        for run in running:
            run.kill()


def show(run: Run) -> None:
    """Print the whole output of a gate that failed, the end of one that passed."""
    lines = run.log.read_text(errors="replace").splitlines()
    print(f"--- {run.gate.name}: {run.gate.command}")
    print("\n".join(lines[-SHOWN_LINES:] if run.passed else lines), flush=True)


def choose(names: Sequence[str]) -> list[Gate]:
    """Return the gates of the tiers, and those of the names, behind their setup. Exits where there
    are none."""
    if unknown := [name for name in names if name not in {**TIERS, **GATES}] or not names:
        known = " ".join((*TIERS, *GATES))
        sys.exit(f"no gate {unknown}: python -m tests.gates NAME...; there are {known}")
    gates = [gate for name in names for gate in TIERS.get(name) or (GATES[name],)]
    setup = [SETUP] if any(gate.after for gate in gates) else []
    return list(dict.fromkeys([*setup, *gates]))


def main(names: Sequence[str]) -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    stops = list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stops.append(number))
    start, runs = time.monotonic(), list[tuple[Run, int]]()
    for run in run_all(choose(names), stops):
        runs.append((run, run.seconds))
        show(run)
    for run, seconds in runs:
        mark = "" if run.passed else "  FAILED"
        print(f"{seconds // 60:4}:{seconds % 60:02}  {run.gate.name}{mark}")
    whole = round(time.monotonic() - start)
    print(f"{whole // 60:4}:{whole % 60:02}  in all")
    failed = sum(not run.passed for run, _ in runs)
    print(f"gates: {len(runs) - failed} passed, {failed} failed")
    return min(failed + len(stops), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
