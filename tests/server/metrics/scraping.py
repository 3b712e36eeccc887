"""What a scraper sees."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from engine.client import EngineClient
from engine.types import EngineStats

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


def client_with(
    stats: EngineStats | None = None,
    *,
    alive: bool = True,
    step_age_s: float = 0.0,
    pressure: int = 0,
) -> EngineClient:
    """One that says so, and has nothing behind it."""
    said = {"stats": stats or EngineStats(), "step_age_s": step_age_s, "pressure": pressure}
    return cast(EngineClient, SimpleNamespace(**said, alive=alive))


def samples_of(text: str) -> Samples:
    """Values by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(http: httpx2.AsyncClient) -> Samples:
    """One scrape of a server."""
    response = await http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return samples_of(response.text)


def value(samples: Samples, name: str, **labels: str) -> float:
    """Of one series."""
    return samples[name, tuple(sorted(labels.items()))]


def requests(samples: Samples) -> dict[tuple[str, str], float]:
    """Counts by endpoint and status."""
    return {
        (dict(labels)["endpoint"], dict(labels)["status"]): count
        for (name, labels), count in samples.items()
        if name == "quire_requests_total"
    }


def pool(samples: Samples, part: str) -> float:
    """Bytes of a part of the cache."""
    return value(samples, f"quire_kv_{part}_bytes")
