import re
from pathlib import Path

from engine.planning.capacity import CapacityReport
from engine.planning.memory import read_shape
from server.cli.plan import report_lines
from server.cli.sentences import table
from tests.families import PUBLISHED
from tests.server.cli.plan.conftest import plan

GIB = 1024**3
ROOT = Path(__file__).parents[4]


def sentences(report: CapacityReport) -> str:
    return " ".join(" ".join(report_lines(report)).split())


def row(report: CapacityReport, name: str) -> list[str]:
    """The cells of the table's row of that name."""
    (found,) = (line for line in report_lines(report) if line.startswith(f"  {name} "))
    return re.split(r"  +", found.strip())


def test_the_tables_carry_the_figures_of_qwen3_4b(report: CapacityReport) -> None:
    assert [row(report, name)[1] for name in ("bf16", "q8", "q4")] == ["7.49", "3.98", "2.11"]
    assert max(len(line) for line in report_lines(report)) <= 100, "a terminal's width"


def test_the_details_begin_with_what_pages_buy(report: CapacityReport) -> None:
    dense, chunks, own = report.fits[-1].fifth_context
    said = sentences(report)
    assert said.startswith(f"What pages buy Sequences of {report.fifth_tokens} tokens (a fifth ")
    assert f"fit {own} times into pages, {chunks} times into 256-token chunks, and {dense}" in said
    # 7 of 8 chats do not hold 4096 tokens of 144 KiB.
    assert "A token takes 144 KiB. Pages are shared" in said
    assert "hold them once, which saves 3.94 GiB" in said
    for allocation in ("dense", "256-token chunks", "sparse"):
        assert f"{report.fifth_tokens}: {allocation}" in said


def test_memory_that_holds_nothing_is_said_to(hopeless: CapacityReport) -> None:
    assert row(hopeless, "q4")[3] == "refused"
    assert "times into pages" not in sentences(hopeless)


def test_columns_are_aligned() -> None:
    assert list(table(("name", "n"), [("a", "10"), ("long name", "5")], "  ")) == [
        "  name        n",
        "  a          10",
        "  long name   5",
    ]


def test_the_figures_of_the_readme_are_those_of_its_command(qwen3_4b: Path) -> None:
    """--device 'M4 Pro' --memory 24GiB --context 32768."""
    report = plan(read_shape(qwen3_4b), "24GiB", 32768)
    wide, _, small = (fit.fifth_context for fit in report.fits)
    said = (
        f"Of a Mac's 24 GiB its GPU may use {report.demand.machine_bytes // GIB}, of which 1.5 are "
        f"left to others: of sequences of {report.fifth_tokens} tokens (a fifth of the context) "
        f"they hold {wide[0]} densely and {wide[-1]} in pages, and with 4-bit weights {small[0]} "
        f"and {small[-1]}."
    )
    assert said in " ".join((ROOT / "engine/models/README.md").read_text().split())


def test_states_have_a_sentence(tmp_path: Path) -> None:
    shape = read_shape(PUBLISHED["Qwen3.5-4B"].write(tmp_path))
    states = "a sequence up to 147.38 MiB for the states of its recurrent layers"
    assert f"A token takes 32 KiB, and {states}" in sentences(plan(shape, "24GiB"))
