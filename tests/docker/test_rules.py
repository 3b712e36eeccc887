import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.docker.boards import DOCKER, ROOT, Rule, alerts, recordings

PROMETHEUS = DOCKER / "prometheus"
ALERTS = alerts()
SETTING = re.compile(r"\b(?:server|access|limits|engine|cache|metrics|log)\.[a-z_]+")


def is_clear(alert: Rule) -> bool:
    """Whether an alert says how bad it is, where, and what to do."""
    says = alert.settings["annotations"]
    is_graded = alert.settings["labels"]["severity"] in {"warning", "critical"}
    is_said = "instance" in says["summary"] and says["description"].endswith(".")
    return bool(alert.settings["for"] and is_graded and is_said)


def is_tested(alert: Rule, tests: list[dict[str, Any]]) -> bool:
    """Whether there is a test where the alert fires, and one where it does not."""
    cases = [
        case for test in tests if test["name"] == alert.name for case in test["promql_expr_test"]
    ]
    is_own = all(f'alertname="{alert.name}"' in case["expr"] for case in cases)
    return is_own and {"exp_samples" in case for case in cases} == {True, False}


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    assert [alert.name for alert in ALERTS if not is_clear(alert)] == []


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
