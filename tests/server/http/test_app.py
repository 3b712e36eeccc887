import asyncio

import httpx2
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from structlog.testing import capture_logs

from server.http import app as app_module
from server.http.app import create_app, release_when_idle
from server.routes.service import Service
from tests.server.harness import CHAT, COMPLETIONS, Engine, chat, eventually, http_client


def error_of(response: httpx2.Response) -> dict[str, str]:
    """The error, which looks like all others."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, str] = body["error"]
    return error


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v0/models",
        "/props",
        "/v2/chat/completions",
        "/v1/rerank",
        "/docs",
        "/%00",
        "/x//",
        "/nothing/",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_path_without_anything_is_an_error_like_all_others(
    http: httpx2.AsyncClient, method: str, path: str
) -> None:
    response = await http.request(method, path)
    assert response.status_code == 404
    assert error_of(response)["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["/v1/responses/compact", "/v1/responses/resp_1"])
async def test_an_endpoint_of_openais_that_is_not_here_is_no_wrong_method(
    http: httpx2.AsyncClient, path: str
) -> None:
    response = await http.post(path, json={})
    assert response.status_code == 404
    assert error_of(response)["type"] == "not_found_error"
    assert (await http.put(path, json={})).status_code == 405


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", COMPLETIONS, "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/v1/models/recall", "GET"),
        ("POST", "/health", "GET"),
        ("POST", "/", "GET, HEAD"),
        ("OPTIONS", "/metrics", "GET"),
        ("BREW", "/ready", "GET"),
        ("POST", "/version", "GET"),
        ("GET", "/tokenize", "POST"),
    ],
)
async def test_a_method_that_a_path_does_not_answer_is_named(
    http: httpx2.AsyncClient, method: str, path: str, allowed: str
) -> None:
    response = await http.request(method, path)
    assert response.status_code == 405
    assert sorted(response.headers["allow"].split(", ")) == allowed.split(", ")
    assert method in error_of(response)["message"]


async def test_a_bug_is_logged_and_never_told_to_clients(
    broken: str, http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with capture_logs() as entries:
        response = await http.get(broken)
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    (entry,) = [entry for entry in entries if entry["log_level"] == "error"]
    assert entry["endpoint"] == broken
    assert entry["at"][0] == "RuntimeError"
    assert entry["at"][-1].endswith("broken")
    assert "secret" not in str(entries)
    assert not caplog.records, "nobody says it again"


async def test_a_refusal_of_the_framework_is_an_error_like_all_others(
    app: FastAPI, http: httpx2.AsyncClient
) -> None:
    @app.get("/teapot")
    async def teapot() -> None:
        raise HTTPException(418, "short and stout", {"X-Handle": "here"})

    response = await http.get("/teapot")
    assert response.status_code == 418
    assert response.headers["x-handle"] == "here"
    assert error_of(response)["message"] == "short and stout"


async def test_answers_reach_the_event_loop_that_serves(service: Service) -> None:
    """Tests run on a loop each, and share an engine: the newest one gets the events."""
    app = create_app(service)
    for _ in range(2):
        async with app.router.lifespan_context(app), http_client(app) as http:
            assert (await http.post(CHAT, json=chat(max_tokens=2))).status_code == 200


async def test_a_slash_at_the_end_of_a_path_is_no_other_path(http: httpx2.AsyncClient) -> None:
    for path in (CHAT, "/v1/responses", "/v1/messages/count_tokens", "/tokenize"):
        assert (await http.post(f"{path}/", json={})).status_code == 400
    for path in ("/health/", "/v1/models//", "/v1/models/recall/"):
        assert (await http.get(path)).status_code == 200


async def test_memory_is_released_again_and_again_when_those_who_asked_have_left(
    engine: Engine, service: Service, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = 0

    def release() -> None:
        nonlocal released
        released += 1

    async def released_in_a_while() -> int:
        before = released
        await asyncio.sleep(0.1)
        return released - before

    monkeypatch.setattr(app_module, "LOOK_S", 0.01)
    monkeypatch.setattr(app_module, "release_free_memory", release)
    forgotten = 0

    def forget() -> None:
        nonlocal forgotten
        forgotten += 1

    releasing = asyncio.create_task(release_when_idle(service.drain, 0.05, forget))
    await http.get("/health")
    assert await released_in_a_while() == 0, "nobody has asked for anything"
    for _ in range(2):
        engine.gate.close()
        asking = asyncio.create_task(http.post(CHAT, json=chat(max_tokens=2)))
        await eventually(lambda: service.drain.answering > 0)
        await asyncio.sleep(0.1)  # what had begun before has ended
        assert await released_in_a_while() == 0, "somebody is there"
        engine.gate.open()
        assert (await asking).status_code == 200
        last, kept = released, forgotten
        # The engine gives memory back some time after the last answer.
        await eventually(lambda: released >= last + 3)  # noqa: B023
        await eventually(lambda: forgotten > kept)  # noqa: B023
    releasing.cancel()
