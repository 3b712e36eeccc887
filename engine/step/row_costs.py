"""How long steps and draft passes take, by their number of rows, as learnt from those that ran.

A file of the user's cache folder keeps the costs from one start to the next, for one model with one
way to compute on this machine. It also tells how drafts of a head would change answers."""

import json
import logging
import math
import os
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import metal_ext
from kvcache.backends.faults import write_record
from kvcache.selftest.machine import this_machine, wheel_tag
from kvcache.user_folders import cache_folder

log = logging.getLogger(__name__)

# The weight of one measured step or pass in an average: less if it took longer than before, since
# other programs make steps longer and never shorter.
STEP_WEIGHT, LONGER_STEP_WEIGHT = 0.2, 0.1
# Until it is measured: what a row adds to a step, as a share of a step of one row, and what a draft
# pass takes, as a share of a step with as many rows.
FIRST_ROW_COST, FIRST_PASS_COST = 0.1, 0.1
Seconds = dict[int, float]
"""Times by numbers of rows."""


class CostTable:
    """Averages of measured times by number of rows. A time that was not measured is that of the
    nearest number of rows, by the ratio of the two in ``assumed``."""

    def __init__(self, assumed: Callable[[int], float], seconds: Seconds | None = None) -> None:
        self._assumed = assumed
        self.seconds: Seconds = seconds or {}

    def observe(self, rows: int, seconds: float) -> None:
        before = self.seconds.get(rows, seconds)
        weight = STEP_WEIGHT if seconds < before else LONGER_STEP_WEIGHT
        self.seconds[rows] = before + weight * (seconds - before)

    def __getitem__(self, rows: int) -> float:
        if rows in self.seconds or not self.seconds:
            return self.seconds.get(rows) or self._assumed(rows)
        nearest = min(self.seconds, key=lambda known: abs(known - rows))
        return self.seconds[nearest] * self._assumed(rows) / self._assumed(nearest)


class RowCosts:
    """The costs of one model's steps and draft passes. What an earlier process has learnt tells the
    ratios between numbers of rows, until they are measured again: the machine may be slower now."""

    def __init__(self, file: "CostsFile | None" = None) -> None:
        self._file = file
        steps, passes, _ = ({}, {}, "") if file is None else file.read()
        self._old_steps = CostTable(lambda rows: 1 + FIRST_ROW_COST * (rows - 1), steps)
        self._old_passes = CostTable(lambda rows: FIRST_PASS_COST * self._old_steps[rows], passes)
        self._steps = CostTable(self._old_steps.__getitem__)
        self._passes = CostTable(
            lambda rows: self._old_passes[rows] / self._old_steps[rows] * self._steps[rows]
        )
        self._is_saved = True

    def observe(self, rows: int, seconds: float) -> None:
        """Note how long a step with this many rows took."""
        self._steps.observe(rows, seconds)
        self._is_saved = False

    def ratio(self, rows: int, more: int) -> float:
        """Return the time of a step with ``rows + more`` rows, by that of one with ``rows``."""
        return self._steps[rows + more] / self._steps[rows]

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Note how long a draft pass over ``rows`` sequences took."""
        if self._steps.seconds or self._old_steps.seconds:  # else a step has no time to compare
            self._passes.observe(rows, seconds)
            self._is_saved = False

    def pass_ratio(self, rows: int) -> float:
        """Return the time of a draft pass by that of a step, both with ``rows`` rows."""
        return self._passes[rows] / self._steps[rows]

    def knows(self, rows: int) -> bool:
        """Return True if a step with this many rows was measured, by an earlier process maybe."""
        return rows in self._steps.seconds or rows in self._old_steps.seconds

    def save(self) -> None:
        """Write down what is new. No file is written while an engine serves."""
        if self._file is None or self._is_saved:
            return
        steps = {rows: self._steps[rows] for rows in self._old_steps.seconds | self._steps.seconds}
        known = self._old_passes.seconds | self._passes.seconds
        self._file.write(steps, {rows: self._passes[rows] for rows in known})


class CostsFile:
    """Keeps a model's costs for the next process that computes it in the same way."""

    def __init__(self, model: bytes, way: str) -> None:
        """``model`` is the model's digest. ``way`` tells how the model is computed."""
        kernels = sha256(Path(metal_ext._ext.__file__).read_bytes()).hexdigest()
        program = {"quire": version("quire"), "kernels": kernels, "mlx_wheel": wheel_tag()}
        self._about = {"model": model.hex(), "way": way, **program, **this_machine().as_json()}
        key = sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()
        self._name = f"costs-{key[:16]}.json"

    def read(self) -> tuple[Seconds, Seconds, str]:
        """Return times of steps and draft passes, and the fault of drafts; none of a wrong file."""
        try:
            record = json.loads((cache_folder() / self._name).read_bytes())
            if {name: record.get(name) for name in self._about} != self._about:
                raise ValueError("it is about another model or machine")
            return _times(record["steps"]), _times(record["passes"]), str(record["draft_fault"])
        except FileNotFoundError:
            return {}, {}, ""
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the costs of steps are learnt anew: %s: %r", self._name, error)
            return {}, {}, ""

    def write(self, steps: Seconds, passes: Seconds, draft_fault: str = "") -> None:
        costs = {"steps": steps, "passes": passes, "draft_fault": draft_fault}
        try:
            os.close(write_record(self._name, {**self._about, **costs})[1])
        except (OSError, RuntimeError) as error:
            log.warning("the costs of steps are not kept: %s", error)


def _times(table: dict[str, float]) -> Seconds:
    """Raises ValueError if a number of rows or a time is none."""
    times = {int(rows): float(seconds) for rows, seconds in table.items()}
    if not all(rows > 0 and 0 < seconds < math.inf for rows, seconds in times.items()):
        raise ValueError("it has numbers that are no times")
    return times
