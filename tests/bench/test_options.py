from pathlib import Path

import pytest

import metal_ext
from tests.bench.options import DEFAULT_PARTS, Options, read_options


def options(*arguments: str) -> Options:
    return read_options(arguments, "what it is")


def test_prompts_are_new_in_every_run_unless_a_seed_is_given() -> None:
    first, second = options(), options()
    assert next(first.contest.seeds) != next(second.contest.seeds)
    again = options("--seed", str(first.seed))
    assert next(again.contest.seeds) + 1 == next(first.contest.seeds)


def test_parts_with_servers_that_have_to_be_built_are_asked_for_by_name() -> None:
    assert options().parts == DEFAULT_PARTS
    assert not {"instruction-sets", "memory"} & set(DEFAULT_PARTS)
    assert options("--only", "memory").parts == ("memory",)


def test_instruction_sets_are_named_with_commas_or_again_and_again() -> None:
    assert options().sets == ()
    assert options("--sets", "avx2,vnni", "--sets", "amx").sets == ("avx2", "vnni", "amx")


def test_an_instruction_set_without_a_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--sets", "avx2,sse2")
    assert "sse2: only amx, bf16, vnni, avx512, avx2, dotprod are known" in capsys.readouterr().err


def test_builds_lie_below_the_folder_of_models_unless_another_is_named() -> None:
    assert options("--folder", "/f").llama == Path("/f/llama")
    assert options("--folder", "/f", "--llama", "/g").llama == Path("/g")


def test_of_a_quire_at_a_url_nobody_knows_the_instruction_set() -> None:
    best = metal_ext.instruction_sets()[0]
    assert options().instruction_set("servers") == best
    at_url = options("--ours", "http://127.0.0.1:1")
    assert at_url.instruction_set("servers") == "not known"
    assert at_url.instruction_set("attention") == best, "it runs in this process"
