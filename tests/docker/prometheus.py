"""A Prometheus of one's own, on a port of the loopback address, that ends with the block."""

import http.client
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml  # type: ignore[import-untyped]

from tests.docker.boards import DOCKER, ROOT
from tests.ports import HeldPort

TOOLS = ROOT / "build" / "docker" / "tools"
PROMETHEUS = TOOLS / "usr" / "bin" / "prometheus"
PROMTOOL = TOOLS / "usr" / "bin" / "promtool"
CONFIGURATION = DOCKER / "prometheus" / "prometheus.yml"
SCRAPE_S = 1
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
QUERY_TIMEOUT_S = 60.0
Series = list[dict[str, Any]]


class QueryError(Exception):
    """Prometheus does not take an expression; the message is its own."""


class Prometheus:
    def __init__(self, port: int) -> None:
        self._port = port

    def query(self, expr: str) -> Series:
        """Return the value now. Raises QueryError."""
        return self._ask("/api/v1/query", {"query": expr})

    def query_range(self, expr: str, start_s: float, end_s: float) -> Series:
        """Return values over time, as a panel wants them. Raises QueryError."""
        span = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": "1s"}
        return self._ask("/api/v1/query_range", {"query": expr} | span)

    def targets(self) -> dict[str, str]:
        """Return the health of each scraped job."""
        found = json.loads(self._get("/api/v1/targets")[1])["data"]["activeTargets"]
        return {target["labels"]["job"]: target["health"] for target in found}

    def is_ready(self) -> bool:
        try:
            return self._get("/-/ready")[0] == 200
        except OSError:
            return False

    def _ask(self, path: str, fields: dict[str, str]) -> Series:
        answer = json.loads(self._get(f"{path}?{urlencode(fields)}")[1])
        if answer["status"] != "success":
            raise QueryError(f"{fields['query']}: {answer['error']}")
        result = answer["data"]["result"]
        assert isinstance(result, list)
        return result

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=QUERY_TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def finite(series: Series) -> Series:
    """Return the series that have a number at any time."""
    return [one for one in series if any(math.isfinite(float(v)) for v in _values(one))]


def _values(one: dict[str, Any]) -> list[str]:
    points = one["values"] if "values" in one else [one["value"]]
    return [value for _, value in points]


def configuration(quire: str, own_port: int, folder: Path, scrape_key: str) -> dict[str, Any]:
    """docker/'s own, but for addresses, places of files, and haste.

    quire: ``host:port``. What only a network of containers can find is left out.
    """
    settings: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    settings["global"] = {
        "scrape_interval": f"{SCRAPE_S}s",
        "scrape_timeout": f"{SCRAPE_S}s",
        "evaluation_interval": f"{SCRAPE_S}s",
    }
    settings["rule_files"] = [str(DOCKER / "prometheus" / name) for name in settings["rule_files"]]
    key_file = folder / "scrape_key"
    key_file.write_text(scrape_key)
    jobs = []
    for job in settings["scrape_configs"]:
        if "static_configs" not in job:
            continue
        native = job["job_name"] == "quire-native"
        job["static_configs"] = [{"targets": [quire if native else f"127.0.0.1:{own_port}"]}]
        if native:
            job["authorization"]["credentials_file"] = str(key_file)
        jobs.append(job)
    assert [job["job_name"] for job in jobs] == ["quire-native", "prometheus"]
    return settings | {"scrape_configs": jobs}


@contextmanager
def scraping(quire: str, scrape_key: str) -> Iterator[Prometheus]:
    """Start a Prometheus that scrapes a quire. Raises AssertionError where it does not start."""
    with tempfile.TemporaryDirectory() as name, closing(HeldPort()) as held:
        folder, port = Path(name), held.number
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration(quire, port, folder, scrape_key)))
        options = [
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        process = subprocess.Popen([PROMETHEUS, *options])
        try:
            found = Prometheus(port)
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not found.is_ready():
                assert process.poll() is None, f"Prometheus ended with {process.returncode}"
                assert time.monotonic() < deadline_s, "Prometheus did not start"
                time.sleep(0.1)
            yield found
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
