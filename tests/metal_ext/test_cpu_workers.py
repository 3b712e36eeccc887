import pytest

from metal_ext import CpuWorkers, instruction_sets


def test_the_best_instruction_set_is_the_one_that_is_taken() -> None:
    best = instruction_sets()[0]
    assert CpuWorkers(1).instruction_set == best
    known = {"amx", "bf16", "vnni", "avx512", "avx2", "sse2", "dotprod", "neon"}
    assert set(instruction_sets()) <= known


@pytest.mark.parametrize("name", instruction_sets())
def test_an_instruction_set_is_chosen_by_name(name: str) -> None:
    workers = CpuWorkers(3, name)
    assert (workers.threads, workers.instruction_set) == (3, name)


@pytest.mark.parametrize("name", ["", "mmx", "AUTO", "avx", "auto "])
def test_an_unknown_instruction_set_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not to be had.*{instruction_sets()[-1]}"):
        CpuWorkers(1, name)
