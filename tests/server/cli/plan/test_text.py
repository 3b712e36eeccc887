import re
from pathlib import Path

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
    assert "A token takes 144 KiB" in " ".join(lines.split())
    assert [row(lines, name)[1] for name in ("bf16 ", "q8 ", "q4 ")] == ["7.49", "3.98", "2.11"]


def test_the_details_begin_with_what_pages_buy(report: CapacityReport) -> None:
    lines = text(report)
    dense, chunks, own = report.fits[-1].fifth_context
    said = " ".join(lines.split())
    assert said.startswith(f"What pages buy Sequences of {report.fifth_tokens} tokens (a fifth ")
    assert f"fit {own} times into pages, {chunks} times into 256-token chunks, and {dense}" in said
    # 7 of 8 chats do not hold 4096 tokens of 144 KiB.
    assert "hold them once, which saves 3.94 GiB" in said
    for allocation in ("dense", "256-token chunks", "sparse"):
        assert allocation in lines


def test_memory_that_holds_nothing_is_said_to(hopeless: CapacityReport) -> None:
    lines = text(hopeless)
    assert row(lines, "q4")[3] == "refused"
    assert "times into pages" not in lines


def test_no_line_is_too_long_for_a_terminal(report: CapacityReport) -> None:
    assert max(len(line) for line in report_lines(report)) <= 100


def test_columns_are_aligned() -> None:
    assert list(table(("name", "n"), [("a", "10"), ("long name", "5")], "  ")) == [
        "  name        n",
        "  a          10",
        "  long name   5",
    ]


def test_the_figures_of_the_readme_are_those_of_its_command(qwen3_4b: Path) -> None:
    """--device 'M4 Pro' --memory 24GiB --context 32768."""
    device = find_device("M4 Pro")
    assert device is not None
    config = engine_config(Config())
    report = plan_capacity(read_shape(qwen3_4b), device, 24 * GIB, 32768, config)
    wide, _, small = (fit.fifth_context for fit in report.fits)
    said = (
        f"Of a Mac's 24 GiB its GPU may use {report.demand.machine_bytes // GIB}, of which 1.5 are "
        f"left to others: of sequences of {report.fifth_tokens} tokens (a fifth of the context) "
        f"they hold {wide[0]} densely and {wide[-1]} in pages, and with 4-bit weights {small[0]} "
        f"and {small[-1]}."
    )
    assert said in " ".join((ROOT / "engine/models/README.md").read_text().split())


def test_states_have_a_sentence(tmp_path: Path) -> None:
    device = find_device("M4 Pro")
    assert device is not None
    shape = read_shape(PUBLISHED["Qwen3.5-4B"].write(tmp_path))
    lines = text(plan_capacity(shape, device, 24 * GIB, 4096, engine_config(Config())))
    states = "a sequence up to 147.38 MiB for the states of its recurrent layers"
    assert f"A token takes 32 KiB, and {states}" in " ".join(lines.split())
