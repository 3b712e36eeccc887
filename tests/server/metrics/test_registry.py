import os
import re
import shutil
import subprocess
from importlib.metadata import version

import pytest
from prometheus_client.core import Metric

from engine.client import EngineClient
from server.config import MetricsSection, ModelsSection
from server.metrics import Metrics
from server.metrics.families import HELP
from server.metrics.registry import About
from server.metrics.requests import HttpMetrics, Refusal
from server.ray.membership import Membership, ReplicasCollector
from server.supervisor.metrics import ModelsCollector
from server.supervisor.models import ModelSupervisor
from tests.engines import recall_loop
from tests.server.harness import Engine
from tests.server.metrics.scraping import client_with, samples_of, value

PROMTOOL = shutil.which(os.environ.get("PROMTOOL", "promtool"))
# Of promlint's rules, those that a name can break.
ABBREVIATIONS = {"s", "ms", "us", "ns", "sec", "min", "h", "b", "kb", "mb", "gb", "pct"}
OTHER_UNITS = {"milliseconds", "microseconds", "minutes", "hours", "kilobytes", "megabytes"}


def test_what_is_served_is_named() -> None:
    metrics = Metrics(client_with(), About("org/model", "posix", "float32", 100))
    samples = samples_of(metrics.render().decode())
    labels = {"model": "org/model", "kv_backend": "posix", "arithmetic": "float32"}
    assert value(samples, "quire_info", version=version("quire"), **labels) == 1
    assert value(samples, "quire_request_prompt_tokens_bucket", le="100.0") == 0
    assert ("quire_request_prompt_tokens_bucket", (("le", "200.0"),)) not in samples


def test_what_happens_at_the_door_is_counted() -> None:
    metrics = Metrics(client_with(), footprint=lambda heap_bytes: heap_bytes + 9)
    metrics.count_refusal(Refusal.QUEUE_FULL)
    metrics.connection_opened()
    metrics.connection_opened()
    metrics.connection_closed()
    metrics.draining = True
    samples = samples_of(metrics.render().decode())
    assert value(samples, "quire_refused_requests_total", reason="queue_full") == 1
    assert value(samples, "quire_open_connections") == 1
    assert value(samples, "quire_draining_ratio") == 1
    assert value(samples, "quire_process_footprint_bytes") == 9
    metrics.draining = False
    assert value(samples_of(metrics.render().decode()), "quire_draining_ratio") == 0
    metrics.connection_closed()
    with pytest.raises(AssertionError):
        metrics.connection_closed()


def test_every_reason_to_refuse_is_there_from_the_start() -> None:
    metrics = HttpMetrics(100)
    metrics.count_refusal(Refusal.HOST)
    samples = samples_of(metrics.render().decode())
    found = {
        dict(labels)["reason"]: count
        for (name, labels), count in samples.items()
        if name == "quire_refused_requests_total"
    }
    assert found == dict.fromkeys(map(str, Refusal), 0) | {"host": 1}


def test_an_engine_that_was_never_started_has_no_pool_yet() -> None:
    client = EngineClient(recall_loop, max_queue=1, max_backlog=1)
    text = Metrics(client).render().decode()
    assert "quire_engine_alive_ratio 0.0" in text
    assert "quire_kv_" not in text.replace("quire_kv_copied", "")


# --- names -----------------------------------------------------------------------------------


def families(client: EngineClient) -> dict[str, Metric]:
    """All metrics of all kinds of servers, by full name."""
    several = ModelsCollector(ModelSupervisor(ModelsSection(), 0))
    replicas = ReplicasCollector(Membership(1.0, lambda: 0.0))
    own = Metrics(client, settings=MetricsSection(vllm_names=True)).registry
    shown = (*own.collect(), *several.collect(), *replicas.collect())
    return {each.name + "_total" * (each.type == "counter"): each for each in shown}


def test_names_follow_the_conventions(engine: Engine) -> None:
    """https://prometheus.io/docs/practices/naming/"""
    for name, family in families(engine.client).items():
        assert not family.documentation.endswith(".")
        assert name.endswith("_total") == (family.type == "counter")
        if not name.startswith("vllm:"):
            assert re.fullmatch(r"(quire|process)_[a-z0-9]+(_[a-z0-9]+)*", name)
            assert not set(name.split("_")) & (ABBREVIATIONS | OTHER_UNITS | {"counter", "gauge"})
            assert not name.endswith(("_bucket", "_count", "_sum", "_created"))


def test_each_help_text_is_shown_with_its_metric(engine: Engine) -> None:
    shown = {name: family.documentation for name, family in families(engine.client).items()}
    assert HELP.items() <= shown.items()


def test_no_series_says_when_it_was_made(engine: Engine) -> None:
    assert "_created" not in Metrics(engine.client).render().decode()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is Prometheus' own")
def test_prometheus_own_check_accepts_all(engine: Engine) -> None:
    assert PROMTOOL is not None
    metrics = Metrics(engine.client)
    metrics.count_request("/health", 200)
    metrics.request_ended("/health", 0.1)
    command = [PROMTOOL, "check", "metrics"]
    found = subprocess.run(command, input=metrics.render(), capture_output=True, check=False)
    assert (found.returncode, found.stderr, found.stdout) == (0, b"", b"")
