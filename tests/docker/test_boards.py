import re
import subprocess
import sys
from typing import Any

import pytest

from tests.docker.boards import (
    DOCKER,
    Target,
    boards,
    metrics_of,
    recorded_of,
    recordings,
    rules,
    targets,
)
from tests.docker.metrics import all_series

TARGETS = list(targets())
PANELS = [
    (name, panel)
    for name, board in boards().items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
SERIES = re.compile(r"\b(?:quire[_:]|process_)[a-z0-9_:]+\b|\bup\b(?=[{)])")
CHOSEN = 'job=~"$job",instance=~"$instance"'


def is_clear(panel: dict[str, Any]) -> bool:
    """Whether a panel says what it shows, and in which unit."""
    options, fields = panel["options"], panel["fieldConfig"]["defaults"]
    unit = options.get("yAxis", {}).get("unit") or fields["unit"]
    return bool(panel["title"] and panel["description"].endswith(".") and unit and panel["targets"])


def is_of_the_chosen(target: Target) -> bool:
    """Whether a query asks for series of the chosen instances alone, and leaves no variable."""
    ends = [found.end() for found in SERIES.finditer(target.expr)]
    return "$" not in target.executable and all(
        target.expr[end:].startswith("{" + CHOSEN) for end in ends
    )


@pytest.fixture(scope="module")
def series() -> set[str]:
    return all_series()


def test_the_committed_boards_are_what_the_code_makes() -> None:
    script = DOCKER / "grafana" / "dashboards.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_of_a_panel_is_one_that_quire_shows(series: set[str]) -> None:
    for target in TARGETS:
        assert metrics_of(target.expr) <= series, target


def test_every_metric_of_a_rule_is_one_that_quire_shows(series: set[str]) -> None:
    for rule in rules():
        assert metrics_of(rule.expr) <= series, rule.name


def test_every_recorded_series_that_is_asked_for_is_recorded() -> None:
    recorded = {rule.name for rule in recordings()}
    for expr in [target.expr for target in TARGETS] + [rule.expr for rule in rules()]:
        assert recorded_of(expr) <= recorded, expr


def test_every_panel_says_what_it_shows_in_which_unit() -> None:
    assert [f"{board}-{panel['id']}" for board, panel in PANELS if not is_clear(panel)] == []


def test_every_query_is_of_the_chosen_instances_alone() -> None:
    assert [target for target in TARGETS if not is_of_the_chosen(target)] == []


def test_panels_do_not_lie_upon_each_other() -> None:
    for board in boards().values():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells


def test_the_uses_of_the_budget_are_all_on_the_board() -> None:
    (panel,) = (p for _, p in PANELS if p["title"] == "What the budget is used for")
    uses = {target["legendFormat"] for target in panel["targets"]}
    recorded = {rule.settings["labels"]["use"] for rule in recordings() if "by_use" in rule.name}
    assert uses == recorded
    assert panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
