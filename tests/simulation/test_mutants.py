"""Every deliberate bug is caught; without one, the same seeds pass."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, Verdict, hunt, plant

SEEDS = 400  # most are caught within ten
HUNTS_AT_ONCE = 2

Hunts = dict[str | None, Future[Verdict]]


@pytest.fixture(scope="module")
def hunts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hunts]:
    """All of them, a few at a time, by what was planted."""

    def run(mutant: Mutant | None, directory: Path) -> Verdict:
        plant(mutant, directory)
        if mutant is None:
            return hunt(directory, 20)
        seeds = 0 if mutant.in_hour_of_mac else SEEDS
        return hunt(directory, seeds, mutant.first_seed, states=mutant.has_states)

    with ThreadPoolExecutor(HUNTS_AT_ONCE) as pool:
        yield {
            mutant.what if mutant else None: pool.submit(
                run, mutant, tmp_path_factory.mktemp("copy")
            )
            for mutant in (None, *MUTANTS)
        }
        pool.shutdown(cancel_futures=True)


def test_a_copy_without_a_bug_passes(hunts: Hunts) -> None:
    assert hunts[None].result() == Verdict(seeds=20, reason=None)


@pytest.mark.parametrize("what", [mutant.what for mutant in MUTANTS])
def test_a_deliberate_bug_is_caught(what: str, hunts: Hunts) -> None:
    verdict = hunts[what].result()
    assert verdict.reason is not None, f"{verdict.seeds} seeds, and nobody noticed that {what}"


def test_a_bug_needs_exactly_one_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="times"):
        plant(Mutant("", "engine/loop.py", "self", ""), tmp_path)
