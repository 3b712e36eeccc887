from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import httpx2
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from engine.client import EngineClient
from engine.types import EngineStats, MissReason
from server.metrics import Metrics, RequestCounter
from server.text.tokenizer import Tokenizer
from tests.engines import CONFIG
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    Connection,
    Engine,
    chat,
    eventually,
    http_client,
    make_service,
    prompt,
    running,
    start_engine,
)

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
PARTS = ("free", "live", "partial_tail", "mapped_ahead", "cached", "quarantined")
ROUTES = {
    CHAT,
    COMPLETIONS,
    "/v1/models",
    "/v1/models/{name:path}",
    "/health",
    "/ready",
    "/metrics",
    "none",
}
SECRET = "zebra-canary"


async def scrape(http: httpx2.AsyncClient) -> Samples:
    response = await http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str) -> float:
    return samples[name, ()]


def requests(samples: Samples) -> dict[tuple[str, str], float]:
    """Counts by endpoint and status."""
    return {
        (dict(labels)["endpoint"], dict(labels)["status"]): count
        for (name, labels), count in samples.items()
        if name == "quire_requests_total"
    }


def pool(samples: Samples, part: str) -> float:
    return value(samples, f"quire_kv_{part}_bytes")


async def test_the_parts_of_the_pool_add_up_to_its_capacity(tokenizer: Tokenizer) -> None:
    engine = start_engine()
    engine.gate.closed = True
    async with (
        running(make_service(engine.client, tokenizer)) as app,
        http_client(app) as http,
    ):
        open_ones = [Connection(app, COMPLETIONS, prompt("x" * 50, max_tokens=60))] * 2
        seen = []
        for _ in range(40):
            await engine.step()
            samples = await scrape(http)
            assert sum(pool(samples, part) for part in PARTS) == pool(samples, "capacity")
            assert pool(samples, "capacity") == CONFIG.kv_budget_bytes
            seen.append(samples)
        assert max(pool(samples, "live") for samples in seen) > 0
        assert max(pool(samples, "partial_tail") for samples in seen) > 0
        assert max(value(samples, "quire_requests_running") for samples in seen) == 1
        engine.gate.open()
        for connection in open_ones:
            await connection.end()
        await eventually(lambda: engine.client.stats.running == 0)
        samples = await scrape(http)
        assert pool(samples, "live") == pool(samples, "partial_tail") == 0
        assert sum(pool(samples, part) for part in PARTS) == pool(samples, "capacity")
    engine.stop()


async def test_memory_is_charged_while_it_is_used(http: httpx2.AsyncClient) -> None:
    await http.post(CHAT, json=chat(max_tokens=100))
    samples = await scrape(http)
    assert 0 < pool(samples, "committed") <= 2 * pool(samples, "capacity")
    assert value(samples, "quire_kv_heaps") >= 1
    assert value(samples, "quire_kv_heaps_kept") == 0


async def test_counters_rise_with_the_work(http: httpx2.AsyncClient) -> None:
    before = await scrape(http)
    usage = (await http.post(CHAT, json=chat(max_tokens=9))).json()["usage"]
    names = {
        "quire_prompt_tokens_total": usage["prompt_tokens"],
        "quire_generated_tokens_total": 9,
        "quire_steps_total": 9,
    }
    after = before
    for _ in range(200):
        after = await scrape(http)
        if value(after, "quire_steps_total") >= value(before, "quire_steps_total") + 9:
            break
    for name, amount in names.items():
        assert value(after, name) - value(before, name) == amount
    assert value(after, "quire_step_duration_seconds") > 0
    assert value(after, "quire_step_budget_tokens") > 0
    assert value(after, "quire_failed_rows_total") == 0


def test_what_came_from_the_cache_is_counted_and_misses_have_their_reasons() -> None:
    def text_of(stats: EngineStats) -> str:
        client = SimpleNamespace(stats=stats, alive=True)
        return Metrics(cast(EngineClient, client)).render().decode()

    text = text_of(
        EngineStats(
            cached_prompt_tokens=48,
            prefix_misses=((MissReason.EVICTED, 3), (MissReason.OTHER_SALT, 1)),
            mapping_waits=5,
        )
    )
    assert "quire_prompt_tokens_cached_total 48.0" in text
    assert 'quire_prefix_misses_total{reason="never_cached"} 0.0' in text
    assert 'quire_prefix_misses_total{reason="evicted"} 3.0' in text
    assert 'quire_prefix_misses_total{reason="other_salt"} 1.0' in text
    assert "quire_mapping_waits_total 5.0" in text
    assert text_of(EngineStats()).count("quire_prefix_misses_total{") == len(MissReason)


async def test_every_request_is_counted_by_route_and_status(
    app: FastAPI, http: httpx2.AsyncClient
) -> None:
    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a bug")

    await http.post(CHAT, json=chat(max_tokens=1))
    await http.post(CHAT, json=chat(max_tokens=1, stream=True))
    await http.post(CHAT, json={})
    await http.post(CHAT, json=chat(model="other"))
    await http.get(CHAT)
    await http.post(COMPLETIONS, json=prompt(max_tokens=1))
    await http.get("/v1/models/recall")
    await http.get("/v1/models/other")
    await http.get("/nowhere")
    await http.get("/broken")
    await http.post(CHAT, content=b" " * (9 * 1024**2))
    assert requests(await scrape(http)) == {
        (CHAT, "200"): 2,
        (CHAT, "400"): 1,
        (CHAT, "404"): 1,
        (CHAT, "405"): 1,
        (CHAT, "413"): 1,
        (COMPLETIONS, "200"): 1,
        ("/v1/models/{name:path}", "200"): 1,
        ("/v1/models/{name:path}", "404"): 1,
        ("none", "404"): 1,
        ("/broken", "500"): 1,
    }


async def test_a_client_that_left_is_counted_as_one(tokenizer: Tokenizer) -> None:
    engine = start_engine()
    engine.gate.closed = True
    async with (
        running(make_service(engine.client, tokenizer)) as app,
        http_client(app) as http,
    ):
        connection = Connection(app, CHAT, chat())
        await eventually(lambda: engine.client.in_flight == 1)
        connection.leave()
        await connection.end()
        engine.gate.open()
        assert requests(await scrape(http)) == {(CHAT, "499"): 1}
    engine.stop()


async def test_labels_come_from_routes_and_never_from_clients(http: httpx2.AsyncClient) -> None:
    for path in (
        f"/{SECRET}",
        f"/v1/models/{SECRET}",
        f"/v1/{SECRET}?q={SECRET}",
        f"/health/{SECRET}",
    ):
        await http.get(path, headers={"user-agent": SECRET})
    await http.request(SECRET.upper(), "/health")
    await http.post(CHAT, json=chat(SECRET, model=SECRET, user=SECRET))
    await http.post(CHAT, json=chat(SECRET, user=SECRET, max_tokens=1, stop=[SECRET]))
    text = (await http.get("/metrics")).text
    assert SECRET not in text.lower()
    assert {endpoint for endpoint, _ in requests(await scrape(http))} <= ROUTES


async def test_what_is_no_request_is_not_counted(engine: Engine, tokenizer: Tokenizer) -> None:
    service = make_service(engine.client, tokenizer)
    seen: list[str] = []

    async def lifespan(scope, receive, send):  # type: ignore[no-untyped-def]
        seen.append(scope["type"])

    async def receive() -> Message:
        raise AssertionError

    async def send(_: Message) -> None:
        raise AssertionError

    await RequestCounter(lifespan, service.metrics)({"type": "lifespan"}, receive, send)
    assert seen == ["lifespan"]
    assert "quire_requests_total{" not in service.metrics.render().decode()


async def test_an_engine_that_has_ended_shows(tokenizer: Tokenizer) -> None:
    engine = start_engine()
    async with running(make_service(engine.client, tokenizer)) as app, http_client(app) as http:
        assert value(await scrape(http), "quire_engine_alive_ratio") == 1
        engine.stop()
        assert value(await scrape(http), "quire_engine_alive_ratio") == 0


async def test_a_bug_after_the_answer_has_begun_is_counted_once(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    service = make_service(engine.client, tokenizer)

    async def half(scope, receive, send):  # type: ignore[no-untyped-def]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("a bug")

    counter = RequestCounter(half, service.metrics)
    connection = Connection(counter, "/", b"")
    with pytest.raises(RuntimeError):
        await connection.end()
    text = service.metrics.render().decode()
    assert 'quire_requests_total{endpoint="none",status="200"} 1.0' in text
    assert 'status="500"' not in text


async def test_heaps_that_are_kept_show(engine: Engine, tokenizer: Tokenizer) -> None:
    kv = engine.client.stats.kv
    assert kv is not None
    client = SimpleNamespace(stats=EngineStats(kv=replace(kv, kept_heaps=7)), alive=True)
    text = Metrics(cast(EngineClient, client)).render().decode()
    assert "quire_kv_heaps_kept 7.0" in text


async def test_an_engine_that_was_never_started_has_no_pool_yet(tokenizer: Tokenizer) -> None:
    from tests.engines import recall_loop

    client = EngineClient(recall_loop, max_queue=1, max_backlog=1)
    service = make_service(client, tokenizer)
    text = service.metrics.render().decode()
    assert "quire_engine_alive_ratio 0.0" in text
    assert "quire_kv_" not in text.replace("quire_kv_copied", "")
