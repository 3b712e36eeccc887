import math
from pathlib import Path

import pytest

from tests.bench.options import DEFAULT_PARTS, PARTS, Options, read_options
from tests.bench.programs import Command
from tests.bench.sizes import FULL, QUICK


def options(*arguments: str) -> Options:
    return read_options(arguments, "what it is")


def test_nothing_said_is_the_whole_table_without_what_is_large_or_long() -> None:
    asked = options()
    assert asked.parts == DEFAULT_PARTS
    assert asked.size == FULL
    assert (asked.contest.ours_url, asked.contest.peers, asked.contest.commands) == (None, (), ())
    assert asked.contest.with_mlx_lm
    assert asked.threads >= 1


def test_parts_are_run_in_their_order_however_they_are_asked_for() -> None:
    assert options("--only", "serving", "--only", "attention").parts == ("attention", "serving")
    assert options("--scaling").parts == ("scaling",)
    assert options("--only", "serving", "--scaling").parts == ("serving", "scaling")
    assert {part for name in PARTS for part in options("--only", name).parts} == set(PARTS)


def test_peers_are_named_and_may_be_many() -> None:
    asked = options(
        *("--peer", "a=http://127.0.0.1:1", "--peer", "b=http://127.0.0.1:2/v1"),
        *("--peer-command", "c=run {port}", "--ours", "http://127.0.0.1:3/v1", "--skip-mlx-lm"),
    ).contest
    assert asked.peers == (("a", "http://127.0.0.1:1"), ("b", "http://127.0.0.1:2/v1"))
    assert asked.commands == (Command("c", "run {port}"),)
    assert asked.ours_url == "http://127.0.0.1:3/v1"
    assert not asked.with_mlx_lm


def test_prompts_are_new_in_every_run_unless_a_seed_is_given() -> None:
    first, second = options(), options()
    assert next(first.contest.seeds) != next(second.contest.seeds)
    again = options("--seed", str(first.seed))
    assert next(again.contest.seeds) + 1 == next(first.contest.seeds)


def test_rounds_are_of_every_part_and_without_a_limit() -> None:
    size = options("--rounds", "2", "--quick").size
    assert (size.decode.most, size.scaling.most, size.servers.limit_s) == (2, 2, math.inf)
    assert size.requests_per_stream == QUICK.requests_per_stream
    assert size.limit_passes == QUICK.limit_passes


def test_files_and_weights_are_passed_on(tmp_path: Path) -> None:
    plot, csv = tmp_path / "growth.svg", tmp_path / "rows.csv"
    asked = options(
        *("--scaling", "--plot", str(plot), "--csv", str(csv)),
        *("--weights", "4-bit", "--folder", str(tmp_path)),
    )
    assert (asked.plot, asked.csv, asked.quantised, asked.folder) == (plot, csv, True, tmp_path)
    assert not options().quantised


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plot", "a.png"], "--plot draws what --scaling measures"),
        (["--scaling", "--plot", "a.txt"], "does not end in .png, .svg, .pdf"),
        (["--rounds", "0"], "less than 1"),
        (["--threads", "-1"], "less than 1"),
        (["--peer", "http://127.0.0.1:1"], "not NAME="),
        (["--peer", "a=https://127.0.0.1:1"], "plain http only"),
        (["--peer-command", "a=run"], "has no {port}"),
        (["--ours", "nowhere"], "plain http only"),
        (["--only", "nothing"], "invalid choice"),
    ],
)
def test_what_makes_no_sense_ends_the_program_with_a_reason(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(*arguments)
    assert says in capsys.readouterr().err
