"""The simulator over the copies of engine/ and kvcache/ in the working folder."""

import sys
from pathlib import Path

from kvcache.memory_budget import BudgetError
from tests.simulation.faults import SimulationError
from tests.simulation.mac import mac_hour
from tests.simulation.seeds import run_seeds
from tests.simulation.trace import SeedFailedError

COPIED = ("engine.", "kvcache.")


def hunt(seeds: range, part: str) -> str:
    """Run seeds until one fails, or an hour of a Mac; return what is wrong, or nothing."""
    if part != "mac":
        runs = (run_seeds([seed], states=part == "states")[1] for seed in seeds)
        return next((failed[0].reason for failed in runs if failed), "")
    try:
        mac_hour()
    except SeedFailedError as error:
        return error.reason
    except (BudgetError, SimulationError) as error:
        return str(error)
    return ""


def main() -> None:
    """Print what was found. Exits where other files than the copies were run."""
    first, seeds, part = sys.argv[1:]
    print(hunt(range(int(first), int(first) + int(seeds)), part))
    copied = [module for name, module in sys.modules.items() if name.startswith(COPIED)]
    strangers = {module.__file__ for module in copied if module.__file__} - {
        str(file) for file in Path.cwd().rglob("*.py")
    }
    if strangers:
        sys.exit(f"not the copies were run: {strangers}")
