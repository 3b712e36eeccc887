import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.docker.boards import DOCKER, ROOT, Rule, alerts, recordings
from tests.docker.prometheus import configuration

PROMETHEUS = DOCKER / "prometheus"
ALERTS = alerts()
SETTING = re.compile(r"\b(?:server|access|limits|engine|cache|metrics|log)\.[a-z_]+")


@pytest.mark.parametrize("alert", ALERTS, ids=[alert.name for alert in ALERTS])
def test_an_alert_says_how_bad_it_is_and_what_to_do(alert: Rule) -> None:
    assert alert.settings["for"]
    assert alert.settings["labels"]["severity"] in {"warning", "critical"}
    assert "instance" in alert.settings["annotations"]["summary"]
    assert alert.settings["annotations"]["description"].endswith(".")


@pytest.mark.parametrize("alert", ALERTS, ids=[alert.name for alert in ALERTS])
def test_the_settings_that_an_alert_names_exist(alert: Rule) -> None:
    text = (ROOT / "configs" / "quire.toml").read_text()
    for setting in SETTING.findall(alert.settings["annotations"]["description"]):
        section, _, name = setting.partition(".")
        table = re.split(rf"^\[{section}\]$", text, flags=re.MULTILINE)[1].split("\n[")[0]
        assert re.search(rf"^(# )?{name} = ", table, re.MULTILINE), setting


@pytest.mark.parametrize("alert", ALERTS, ids=[alert.name for alert in ALERTS])
def test_an_alert_has_a_test_where_it_fires_and_one_where_it_does_not(alert: Rule) -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests" / "alerts.yml").read_text())["tests"]
    mine = [
        case for test in tests if test["name"] == alert.name for case in test["promql_expr_test"]
    ]
    assert all(f'alertname="{alert.name}"' in case["expr"] for case in mine)
    assert any("exp_samples" in case for case in mine)
    assert any("exp_samples" not in case for case in mine)


def test_names_of_recorded_series_have_colons_and_those_of_metrics_have_not() -> None:
    for rule in recordings():
        assert re.fullmatch(r"quire:[a-z0-9_]+:[a-z0-9_]+", rule.name)


def test_prometheus_shows_its_key_to_quire_alone() -> None:
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    keys = {job["job_name"]: job.get("authorization", {}).get("credentials_file") for job in jobs}
    key = "/run/secrets/scrape_key"
    assert keys == {"quire-native": key, "quire-container": key, "prometheus": None}


def test_the_gates_prometheus_is_the_boards_but_for_places_and_haste(tmp_path: Path) -> None:

    settings = configuration("127.0.0.1:1", 2, tmp_path, "a scrape key")
    native, own = settings["scrape_configs"]
    assert native["static_configs"] == [{"targets": ["127.0.0.1:1"]}]
    assert own["static_configs"] == [{"targets": ["127.0.0.1:2"]}]
    assert Path(native["authorization"]["credentials_file"]).read_text() == "a scrape key"
    assert settings["rule_files"] == [str(PROMETHEUS / "rules" / "*.yml")]
