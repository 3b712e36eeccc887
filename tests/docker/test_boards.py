"""Boards, rules and alerts name series that quire shows, and say what they are for."""

import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.core import Metric

from engine.client import EngineClient
from engine.types import EngineStats, KVStats
from server.metrics import Metrics
from server.ray.membership import Membership, ReplicasCollector
from server.supervisor.metrics import ModelsCollector
from server.supervisor.models import ModelSupervisor
from tests.docker.boards import (
    DOCKER,
    ROOT,
    Rule,
    Target,
    alerts,
    boards,
    metrics_of,
    recorded_of,
    recordings,
    rules,
    targets,
)

PROMETHEUS = DOCKER / "prometheus"
ALERTS = alerts()
SETTING = re.compile(r"\b(?:server|access|limits|engine|cache|models|metrics|log)\.[a-z_]+")


def is_actionable(alert: Rule) -> bool:
    """Return whether an alert says how bad it is, where, and what to do."""
    says = alert.settings["annotations"]
    is_graded = alert.settings["labels"]["severity"] in {"warning", "critical"}
    is_said = "instance" in says["summary"] and says["description"].endswith(".")
    return bool(alert.settings["for"] and is_graded and is_said)


def is_tested(alert: Rule, tests: list[dict[str, Any]]) -> bool:
    """Return whether there is a test where the alert fires, and one where it does not."""
    cases = [
        case for test in tests if test["name"] == alert.name for case in test["promql_expr_test"]
    ]
    is_own = all(f'alertname="{alert.name}"' in case["expr"] for case in cases)
    return is_own and {"exp_samples" in case for case in cases} == {True, False}


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    assert [alert.name for alert in ALERTS if not is_actionable(alert)] == []


def test_the_settings_that_alerts_name_exist() -> None:
    text = (ROOT / "configs" / "quire.toml").read_text()
    for alert in ALERTS:
        for setting in SETTING.findall(alert.settings["annotations"]["description"]):
            section, _, name = setting.partition(".")
            table = re.split(rf"^\[{section}\]$", text, flags=re.MULTILINE)[1].split("\n[")[0]
            assert re.search(rf"^(# )?{name} = ", table, re.MULTILINE), (alert.name, setting)


def test_every_alert_has_a_test_where_it_fires_and_one_where_it_does_not() -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests" / "alerts.yml").read_text())["tests"]
    assert [alert.name for alert in ALERTS if not is_tested(alert, tests)] == []


def test_names_of_recorded_series_have_colons_and_those_of_metrics_have_not() -> None:
    for rule in recordings():
        assert re.fullmatch(r"quire:[a-z0-9_]+:[a-z0-9_]+", rule.name)


def test_prometheus_shows_its_key_to_quire_alone() -> None:
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    keys = {job["job_name"]: job.get("authorization", {}).get("credentials_file") for job in jobs}
    key = "/run/secrets/scrape_key"
    assert keys == {"quire-native": key, "quire-container": key, "prometheus": None}


SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


MODELS = ModelsCollector(
    cast(ModelSupervisor, SimpleNamespace(models={}, budget_bytes=0, free_bytes=0))
)


def series_of(families: Iterable[Metric]) -> set[str]:
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def all_series() -> set[str]:
    """Return the names of an idle engine's series, of a cluster's front and of several models'
    front, as expressions have them."""
    figures = {field.name: 0 for field in fields(KVStats) if field.name != "slots"}
    stats = EngineStats(kv=KVStats(**figures))  # type: ignore[arg-type]
    client = SimpleNamespace(stats=stats, alive=True, step_age_s=0.0, pressure=0)
    replicas = ReplicasCollector(Membership(1.0, lambda: 0.0))
    families = [*Metrics(cast(EngineClient, client)).registry.collect(), *replicas.collect()]
    return series_of([*families, *MODELS.collect()])


TARGETS = list(targets())
PANELS = [
    (name, panel)
    for name, board in boards().items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
SERIES = re.compile(r"\b(?:quire[_:]|process_)[a-z0-9_:]+\b|\bup\b(?=[{)])")
HERE = 'job=~"$job",instance=~"$instance"'
CHOSEN = f'{HERE},model=~"$model"'
# Series of a whole server: they have no label of a model.
OF_ALL_MODELS = re.compile(r"up|quire_models_.+")


def is_clear(panel: dict[str, Any]) -> bool:
    """Return whether a panel has a description and a unit."""
    options, fields = panel["options"], panel["fieldConfig"]["defaults"]
    unit = options.get("yAxis", {}).get("unit") or fields["unit"]
    return bool(panel["title"] and panel["description"].endswith(".") and unit and panel["targets"])


def is_of_the_chosen(target: Target) -> bool:
    """Return whether a query asks for the chosen instances alone, and leaves no variable."""
    wanted = [
        (found.end(), HERE + "}" if OF_ALL_MODELS.fullmatch(found[0]) else CHOSEN)
        for found in SERIES.finditer(target.expr)
    ]
    return "$" not in target.executable and all(
        target.expr[end:].startswith("{" + chosen) for end, chosen in wanted
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


@pytest.mark.parametrize("board", boards())
def test_a_model_can_be_chosen_and_all_means_a_server_of_one_model_too(board: str) -> None:
    variables = {each["name"]: each for each in boards()[board]["templating"]["list"]}
    assert list(variables) == ["job", "instance", "model"]
    query = f"label_values(quire_model_loaded_ratio{{{HERE}}}, model)"
    assert (variables["model"]["query"], variables["model"]["allValue"]) == (query, ".*")


@pytest.mark.parametrize("name", sorted(series_of(MODELS.collect())))
def test_every_metric_of_several_models_stands_on_a_panel(name: str) -> None:
    assert any(name in metrics_of(target.expr) for target in TARGETS)


@pytest.mark.parametrize("use", ["capacity", "committed", "live", "free_slack"])
def test_what_models_have_is_compared_with_the_budget_of_each(use: str) -> None:
    of_each = f"sum by (model) (quire_kv_{use}_bytes{{{CHOSEN}}})"
    assert any(target.expr == of_each and "{{model}}" in target.legend for target in TARGETS)
    if use == "capacity":
        assert all("by (model)" in each.expr for each in TARGETS if "kv_capacity" in each.expr)


QUOTIENTS = [each for each in TARGETS if re.search("histogram_quantile| / ", each.expr)]


@pytest.mark.parametrize("target", QUOTIENTS, ids=lambda its: f"{its.panel}-{its.legend}")
def test_no_panel_shows_nan_while_nobody_asks(target: Target) -> None:
    assert target.expr.endswith(" >= 0"), "which drops NaN"


def test_a_panel_without_a_value_shows_a_dash() -> None:
    kinds = {panel["type"]: panel["fieldConfig"]["defaults"].get("noValue") for _, panel in PANELS}
    assert kinds == {"stat": "-", "timeseries": "-", "heatmap": None}


def test_panels_do_not_lie_upon_each_other() -> None:
    for board in boards().values():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            slots = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not slots & taken, panel["title"]
            taken |= slots


def test_the_uses_of_the_budget_are_all_on_the_board() -> None:
    (panel,) = (p for _, p in PANELS if p["title"] == "What the budget is used for")
    uses = {target["legendFormat"] for target in panel["targets"]}
    recorded = {rule.settings["labels"]["use"] for rule in recordings() if "by_use" in rule.name}
    assert uses == recorded
    assert panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
