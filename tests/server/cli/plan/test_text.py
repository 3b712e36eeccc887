import re
from pathlib import Path

import pytest

from engine.planning import capacity
from engine.planning.capacity import CapacityReport, plan_capacity
from engine.planning.devices import find_device
from engine.planning.memory import read_shape
from server.cli.plan import report_lines
from server.cli.sentences import table
from server.config import Config, engine_config
from tests.families import PUBLISHED

GIB = 1024**3
ROOT = Path(__file__).parents[4]


def text(report: CapacityReport) -> str:
    return "\n".join(report_lines(report))


def row(lines: str, name: str) -> list[str]:
    """The cells of the table's row of that name."""
    (found,) = re.findall(rf"^  ({re.escape(name)} .*)$", lines, re.MULTILINE)
    return re.split(r"  +", found)


def test_the_tables_carry_the_figures_of_qwen3_4b(report: CapacityReport) -> None:
    lines = text(report)
    assert "Every token of context costs 144 KiB" in lines
    assert row(lines, "32768") == ["32768", "7.49", "4.50", "11.99", "38%"]
    assert row(lines, "131072 *")[3] == "25.49"
    assert "* beyond the 40960 positions" in lines
    assert row(lines, "q4/q4")[1:4] == ["2.11", "0.16", "2.27"]


def test_the_head_says_what_the_gpu_may_use_of_the_memory(report: CapacityReport) -> None:
    head = " ".join(text(report).splitlines()[:5])
    assert head.startswith("Capacity on M4 Pro with 18.00 GiB   Its GPU may use 12.00")
    assert "1.50 are left to other programs" in head


def test_every_question_has_its_table(report: CapacityReport) -> None:
    lines = text(report)
    for heading in (
        "Weights against K and V",
        "What quantisation buys at 4096 tokens",
        "What one sequence is charged by its length",
        "What a page size costs",
        "How many sequences fit",
        "A crowd of 8 requests, bf16 weights",
    ):
        assert heading in lines
    for allocation in ("dense", "256-token chunks", "sparse"):
        assert allocation in lines


def test_a_short_sequence_is_charged_by_the_unit_of_allocation(report: CapacityReport) -> None:
    assert row(text(report), "100") == ["100", "0.0137", "0.56", "0.0352", "0.0176"]


def test_the_last_sentence_says_what_to_take(report: CapacityReport) -> None:
    last = " ".join(text(report).strip().splitlines()[-2:])
    assert last.startswith("For 18.00 GiB and 4096 tokens: bf16 weights are the widest that fit.")
    counts = re.findall(r"(\d+) with (bf16|q8|q4)", last)
    assert counts == [(str(fit.whole_context[-1]), fit.weights.name) for fit in report.fits]


def test_memory_that_holds_nothing_is_said_to(hopeless: CapacityReport) -> None:
    lines = text(hopeless)
    assert "No crowd was simulated: 2.00 GiB do not hold the weights" in lines
    assert "no weights leave room for one sequence; take a smaller model" in lines
    assert "*" not in lines, "all contexts are known to the model"
    assert row(lines, "q4")[2] == "refused"


def test_memory_for_a_shorter_context_alone_is_said_to_hold_that(
    qwen3_4b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mac with 8 GiB serves Qwen3-4B in 4 bits, though not with a context of 32768 tokens."""
    device = find_device("M2")
    assert device is not None
    config = engine_config(Config())
    report = plan_capacity(read_shape(qwen3_4b), device, 8 * GIB, 32768, config)
    tokens = report.fits[-1].tokens
    assert row(text(report), "q4 ")[2:4] == [str(tokens), "0"]
    assert f"no weights leave room for one sequence; take a smaller context ({tokens} tokens " in (
        " ".join(text(report).split())
    )


def test_no_line_is_too_long_for_a_terminal(report: CapacityReport) -> None:
    assert max(len(line) for line in report_lines(report)) <= 100


def test_columns_are_aligned() -> None:
    assert list(table(("name", "n"), [("a", "10"), ("long name", "5")], "  ")) == [
        "  name        n",
        "  a          10",
        "  long name   5",
    ]


def test_the_figures_of_the_readme_are_those_of_its_command(
    qwen3_4b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--device 'M4 Pro' --memory 24GiB --context 32768."""
    monkeypatch.setattr(capacity, "REQUESTS", 48)
    monkeypatch.setattr(capacity, "_crowd", lambda *_: None)
    device = find_device("M4 Pro")
    assert device is not None
    config = engine_config(Config())
    report = plan_capacity(read_shape(qwen3_4b), device, 24 * GIB, 32768, config)
    wide, _, small = (fit.mean_length for fit in report.fits)
    said = (
        f"Of a Mac's 24 GiB its GPU may use {report.demand.machine_bytes // GIB}, of which 1.5 are "
        f"left to others: of the crowd's sequences ({report.mean_tokens} tokens on average) "
        f"they hold {wide[0]} densely and {wide[-1]} in pages, and with 4-bit weights {small[0]} "
        f"and {small[-1]}."
    )
    assert said in " ".join((ROOT / "engine/models/README.md").read_text().split())


def test_states_have_a_column_and_what_is_not_served_a_sentence(
    tmp_path: Path, few_requests: None
) -> None:
    device = find_device("M4 Pro")
    assert device is not None
    heads = {"linear_num_value_heads": 64, "linear_value_head_dim": 64}
    shape = read_shape(PUBLISHED["Qwen3.5-4B"].write(tmp_path, **heads))
    lines = text(plan_capacity(shape, device, 24 * GIB, 4096, engine_config(Config())))
    said = " ".join(lines.split())
    assert "Every token of context costs 32 KiB. Beside that a sequence may have 0.14 GiB" in said
    assert "nets have heads of 64 dimensions, and the GPU's kernels know 128" in said
    assert row(lines, "8192")[3] == "0.14"
