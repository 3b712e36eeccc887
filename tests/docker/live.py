"""A quire under load, a Prometheus that scrapes it, and every expression evaluated."""

import asyncio
import http.client
import math
import subprocess
import time

from tests.clients.servers import QUIRE, serving
from tests.docker.boards import ROOT, Rule, Target, alerts, recordings, targets
from tests.docker.load import Load
from tests.docker.prometheus import (
    PROMTOOL,
    QUERY_TIMEOUT_S,
    SCRAPE_S,
    Prometheus,
    QueryError,
    Series,
    finite,
    scraping,
)

LOAD_S = 25.0
SCRAPED_WITHIN_S = 30.0
KEY = "the-key-of-its-clients"
SCRAPE_KEY = "the-key-of-its-prometheus"
SETTINGS = {
    "access.api_keys": KEY,
    "access.scrape_key": SCRAPE_KEY,
    "limits.max_queued_requests": "6",
    "metrics.vllm_names": "false",
}
# Queries whose numbers need not rise above zero here, by panel and legend, and why.
ALWAYS_ZERO = {
    ("Errors", "5xx"): "nothing breaks",
    ("Errors", "broken off"): "nothing breaks",
    ("Heaps", "kept"): "only a GPU keeps heaps",
    ("Machine", "swap used"): "this machine may have none",
    ("Pressure", "level"): "this machine has memory",
    ("Preemptions and bad rows", "not finite"): "the model is sound",
    ("Alive and draining", "draining"): "nobody ends it",
    ("Why a replica was chosen", "given to another one"): "no replica is lost",
}
# What needs a front with replicas: shown in ``tests/docker/cluster.py``, and here only evaluated.
OF_A_CLUSTER = "quire_replica"


def check_live() -> tuple[int, int]:
    """How many expressions passed, and how many failed."""
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    limits = ["--kv-budget", "3MiB", "--heap-size", "1MiB", "--max-num-seqs", "12"]
    model = str(ROOT / "configs" / "demo" / "model")
    command = (QUIRE, "serve", model, "--port", "0", *limits, *settings)
    with serving(*command) as (address, _), scraping(address[7:], SCRAPE_KEY) as prometheus:
        start_s = time.time()
        load = Load(address, KEY, LOAD_S)
        asyncio.run(load.run())
        print(f"answers: {dict(sorted(load.answers.items()))}")
        outcome = [_metrics_are_sound(address), _is_scraped(prometheus)]
        queries = [its for its in targets() if OF_A_CLUSTER not in its.expr]
        rules = [its for its in recordings() if OF_A_CLUSTER not in its.expr]
        outcome += [shows(prometheus, target, start_s) for target in queries]
        outcome += [_records(prometheus, rule, start_s) for rule in rules]
        others = [its.executable for its in targets() if OF_A_CLUSTER in its.expr]
        others += [its.expr for its in recordings() if OF_A_CLUSTER in its.expr]
        outcome += [_is_taken(prometheus, expr) for expr in others]
        outcome += [_is_evaluated(prometheus, rule) for rule in alerts()]
    return sum(outcome), len(outcome) - sum(outcome)


def _metrics_are_sound(address: str) -> bool:
    """promtool reads what is scraped, as the scraper gets it."""
    connection = http.client.HTTPConnection(address[7:], timeout=QUERY_TIMEOUT_S)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {SCRAPE_KEY}"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True)
    print(f"promtool check metrics: {len(text.splitlines())} lines, exit code {done.returncode}")
    print((done.stdout + done.stderr).decode(), end="")
    return answer.status == 200 and done.returncode == 0


def _is_scraped(prometheus: Prometheus) -> bool:
    """With the scrape key, by both jobs. A scrape that a busy machine was too slow for is followed
    by the next one."""
    wanted = {"quire-native": "up", "prometheus": "up"}
    deadline_s = time.monotonic() + SCRAPED_WITHIN_S
    while (found := prometheus.targets()) != wanted and time.monotonic() < deadline_s:
        time.sleep(SCRAPE_S)
    print(f"scraped: {found}")
    return found == wanted


def shows(prometheus: Prometheus, target: Target, start_s: float) -> bool:
    """A query of a panel shows something over the time of the load: a series with numbers, and one
    above zero but for those that cannot be here."""
    name = f"{target.board:8} {target.panel:32.32} {target.legend:18.18}"
    try:
        prometheus.query(target.executable)
        series = finite(prometheus.query_range(target.executable, start_s, time.time()))
    except QueryError as error:
        return _told(False, name, str(error))
    reason = ALWAYS_ZERO.get((target.panel, target.legend), "")
    peak = _peak(series)
    shown = bool(series) and (peak > 0 or bool(reason))
    told = f"{len(series)} series, up to {peak:.4g}"
    return _told(shown, name, f"{told}: {reason}" if reason else told)


def _records(prometheus: Prometheus, rule: Rule, start_s: float) -> bool:
    """A rule has recorded something, with the labels that it gives."""
    labels = "".join(
        f',{name}="{value}"' for name, value in rule.settings.get("labels", {}).items()
    )
    try:
        prometheus.query(rule.expr)
        recorded = f'{rule.name}{{job="quire-native"{labels}}}'
        series = finite(prometheus.query_range(recorded, start_s, time.time()))
    except QueryError as error:
        return _told(False, rule.name, str(error))
    return _told(bool(series), f"{'record':8} {rule.name + labels:51.51}", f"{len(series)} series")


def _is_taken(prometheus: Prometheus, expr: str) -> bool:
    """An expression is one; it finds nothing here."""
    try:
        prometheus.query(expr)
    except QueryError as error:
        return _told(False, expr, str(error))
    return _told(True, f"{'cluster':8} {expr:51.51}", "evaluated")


def _is_evaluated(prometheus: Prometheus, rule: Rule) -> bool:
    """An alert's expression is taken; what it finds here depends on this machine."""
    try:
        series = prometheus.query(rule.expr)
    except QueryError as error:
        return _told(False, rule.name, str(error))
    return _told(True, f"{'alert':8} {rule.name:51}", f"{len(series)} would wait")


def _peak(series: Series) -> float:
    """The greatest number of any of them at any time."""
    numbers = [float(value) for one in series for _, value in one["values"]]
    return max((number for number in numbers if math.isfinite(number)), default=0.0)


def _told(good: bool, name: str, what: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'} {name} {what}")
    return good
