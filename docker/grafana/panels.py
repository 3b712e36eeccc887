"""Typed builders for the part of Grafana's dashboard model that quire's boards are made of.

A board is rows of panels, each of queries to Prometheus. Places on the grid and ids follow from the
order. The model is that of Grafana's classic JSON (schema version 41), which newer ones read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
GRID_COLUMNS = 24
SCHEMA_VERSION = 41
DATASOURCE: Json = {"type": "prometheus", "uid": "quire-prometheus"}
# Every expression selects by the variables below. HERE is for series without the label model.
HERE = 'job=~"$job",instance=~"$instance"'
CHOSEN = f'{HERE},model=~"$model"'
JOBS = 'up{job=~"quire-.+"}'
GOOD, WARNING, CRITICAL = "green", "orange", "red"


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and the legend of its series."""

    expr: str
    legend: str = "__auto"


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture. Thresholds go up: ``(from, colour)``; below the first is good."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    thresholds: Sequence[tuple[float, str]] = ()
    minimum: float | None = 0
    maximum: float | None = None
    colors: dict[str, str] = field(default_factory=dict)
    """Colours of series by their legends."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]

    def json(self) -> Json:
        """Return the JSON that Grafana is provisioned with."""
        return {
            "annotations": {"list": [_alerts()]},
            "description": self.description,
            "editable": False,
            "graphTooltip": 1,
            "links": [_other_boards()],
            "panels": _laid_out(self.rows),
            "refresh": "10s",
            "schemaVersion": SCHEMA_VERSION,
            "tags": ["quire"],
            "templating": {"list": _variables()},
            "time": {"from": "now-30m", "to": "now"},
            "title": self.title,
            "uid": self.uid,
        }


def _laid_out(rows: Sequence[Row]) -> list[Json]:
    """Place panels from left to right, and on the next line where there is no room."""
    placed: list[Json] = []
    y = 0
    for row in rows:
        at = {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1}
        heading: Json = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        placed.append({"id": len(placed) + 1, "gridPos": at} | heading)
        y += 1
        x = line_height = 0
        for panel in row.panels:
            if x + panel.width > GRID_COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            at = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            placed.append({"id": len(placed) + 1, "gridPos": at} | _panel(panel))
            x += panel.width
            line_height = max(line_height, panel.height)
        y += line_height
    return placed


def _panel(panel: Panel) -> Json:
    options = {"timeseries": _timeseries, "stat": _stat, "heatmap": _heatmap}[panel.kind]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": True,
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            }
            for number, query in enumerate(panel.queries)
        ],
    } | options(panel)


def _timeseries(panel: Panel) -> Json:
    custom: Json = {
        "fillOpacity": 60 if panel.stacked else 10,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if panel.thresholds else "off"},
    }
    return {
        "fieldConfig": _field_config(panel, custom),
        "options": {
            "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True,
                       "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }  # fmt: skip


def _stat(panel: Panel) -> Json:
    return {
        "fieldConfig": _field_config(panel, {}),
        "options": {
            "colorMode": "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _heatmap(panel: Panel) -> Json:
    """Show a histogram's buckets as Prometheus has them: cumulative, named by their upper bound."""
    return {
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
            "yAxis": {"unit": panel.unit, "axisPlacement": "left"},
        },
    }


def _field_config(panel: Panel, custom: Json) -> Json:
    steps: list[Json] = [{"color": GOOD, "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.thresholds]
    defaults: Json = {
        "unit": panel.unit,
        "noValue": "-",
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
    }
    if custom:
        defaults["custom"] = custom
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    overrides = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
        }
        for name, color in panel.colors.items()
    ]
    return {"defaults": defaults, "overrides": overrides}


def _variables() -> list[Json]:
    """Return the variables job (natively on the host, or in a container), instance and model. A
    server of one model has no label model: the value All must match series without it."""
    models = f"label_values(quire_model_loaded_ratio{{{HERE}}}, model)"
    return [
        _variable("job", "Where", f"label_values({JOBS}, job)"),
        _variable("instance", "Instance", 'label_values(up{job=~"$job"}, instance)'),
        _variable("model", "Model", models) | {"allValue": ".*"},
    ]


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _alerts() -> Json:
    """Mark on all panels the times at which an alert fired."""
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": CRITICAL,
        "expr": f'ALERTS{{alertstate="firing",{CHOSEN}}}',
        "titleFormat": "{{alertname}}",
    }


def _other_boards() -> Json:
    return {
        "type": "dashboards",
        "title": "quire",
        "tags": ["quire"],
        "asDropdown": False,
        "keepTime": True,
        "includeVars": True,
        "targetBlank": False,
        "icon": "",
        "tooltip": "",
        "url": "",
    }


# --- expressions that boards repeat, over the chosen instances ------------------------------------

RATE = "[$__rate_interval]"
# Drops NaN, which 0 / 0 gives: panels of an idle server would show it.
IS_NUMBER = ">= 0"


def value(metric: str, by: str = "", chosen: str = CHOSEN) -> str:
    """Sum a gauge over instances and models; by: a label that is kept."""
    return f"sum{_by(by)} ({metric}{{{chosen}}})"


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return a counter's gain per second."""
    return f"sum{_by(by)} (rate({metric}{{{CHOSEN}{where}}}{RATE}))"


def increase(metric: str, by: str = "") -> str:
    """Return a counter's gain per point of the picture."""
    return f"sum{_by(by)} (increase({metric}{{{CHOSEN}}}{RATE}))"


def quantile(share: float, histogram: str, by: str = "le") -> str:
    return f"histogram_quantile({share:g}, {buckets(histogram, by)}) {IS_NUMBER}"


def buckets(histogram: str, by: str = "le") -> str:
    """Return observations per second, by bucket."""
    return rate(f"{histogram}_bucket", by)


def ratio(counter: str, other: str, by: str = "") -> str:
    """Divide the gains of two counters."""
    return f"{rate(counter, by)} / {rate(other, by)} {IS_NUMBER}"


def mean(histogram: str) -> str:
    return ratio(f"{histogram}_sum", f"{histogram}_count")


def percentiles(histogram: str) -> list[Query]:
    return [Query(quantile(share, histogram), f"p{100 * share:g}") for share in (0.5, 0.95, 0.99)]


def _by(label: str) -> str:
    return f" by ({label})" if label else ""
