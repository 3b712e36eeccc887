"""The boards, rules and alerts of docker/, as expressions."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
BOARDS = DOCKER / "grafana" / "dashboards"
RULES = DOCKER / "prometheus" / "rules"
METRIC = re.compile(r"\b(?:quire|process)_[a-z0-9_]+\b")
RECORDED = re.compile(r"\bquire(?::[a-z0-9_]+)+")
# Grafana's values of its variables.
SUBSTITUTES = {
    "$__rate_interval": "15s", "$job": "quire-.*", "$instance": ".*", "$model": ".*",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """A query of a panel."""

    board: str
    panel: str
    legend: str
    expr: str

    @property
    def executable(self) -> str:
        """Return the expression as Grafana sends it, with everything chosen."""
        expr = self.expr
        for name, value in SUBSTITUTES.items():
            expr = expr.replace(name, value)
        assert "$" not in expr, self
        return expr


@dataclass(frozen=True, slots=True)
class Rule:
    """A recording rule or an alert."""

    name: str
    expr: str
    is_alert: bool
    settings: dict[str, Any]


def boards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(BOARDS.glob("*.json"))}


def targets() -> Iterator[Target]:
    for name, board in boards().items():
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield Target(name, panel["title"], target["legendFormat"], target["expr"])


def rules() -> Iterator[Rule]:
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                alert = "alert" in rule
                yield Rule(rule["alert" if alert else "record"], rule["expr"], alert, rule)


def alerts() -> list[Rule]:
    return [rule for rule in rules() if rule.is_alert]


def recordings() -> list[Rule]:
    return [rule for rule in rules() if not rule.is_alert]


def metrics_of(expr: str) -> set[str]:
    """Return the names of quire's own and the process's metrics, with _bucket and the like."""
    return set(METRIC.findall(expr))


def recorded_of(expr: str) -> set[str]:
    return set(RECORDED.findall(expr))
