"""What the front forwards, and what it answers itself."""

import asyncio
import json
import os
import signal
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from engine.power import KeepAwake
from server.http.errors import SAFE_HEADERS
from server.http.guards import body as body_guard
from server.supervisor.front import match_name
from server.supervisor.models import ModelSupervisor
from server.supervisor.process import ModelProcess
from tests.engine.test_power import Machine
from tests.server.harness import CHAT, DEADLINE_S, eventually
from tests.server.supervisor.conftest import Make, served

KEY = "a-key-of-sixteen-characters"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ANTHROPIC = {"anthropic-version": "2023-06-01"}
STATE = ("loaded", "loaded_s", "loading_s")


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines]


async def test_headers_go_to_the_model_and_come_back_once(several: Make) -> None:
    async with served(several()) as (_, client):
        headers = {"x-request-id": "mine", "x-more": "1", "connection": "keep-alive"}
        answer = await client.post(CHAT, json={"model": "a"}, headers=headers)
        got = answer.json()["headers"]
        assert (got["x-request-id"], got["x-more"], got["host"]) == (
            "mine",
            "1",
            client.base_url.netloc.decode(),
        )
        assert "connection" not in got
        names = [name.lower() for name, _ in answer.headers.raw]
        for name in ("x-request-id", "x-own", "date", *(its.lower() for its in SAFE_HEADERS)):
            assert names.count(name.encode()) == 1, name


async def test_a_stream_comes_as_it_is_made(several: Make) -> None:
    async with served(several()) as (_, client):
        body = {"model": "a", "stream": True, "pause_s": 0.2}
        async with client.stream("POST", CHAT, json=body) as answer:
            pieces = [piece async for piece in answer.aiter_text()]
        assert "".join(pieces) == "".join(f'data: {{"piece": {n}}}\n\n' for n in range(3))
        assert len(pieces) > 1, "a busy reader finds some together"


async def test_an_error_of_the_model_is_the_answer(several: Make) -> None:
    async with served(several()) as (_, client):
        answer = await client.post(CHAT, json={"model": "a", "stream": True, "status": 400})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "as asked")


async def test_a_stream_whose_model_loads_begins_at_once_and_tells_errors_as_events(
    several: Make,
) -> None:
    models = several(does={"a": {"load_s": 0.4}}, settings={"server": {"sse_ping_s": 0.05}})
    async with served(models) as (_, client):
        answer = await client.post(CHAT, json={"model": "a", "stream": True})
        assert answer.text.startswith(": waiting\n\n: waiting")
        assert [event["piece"] for event in events_of(answer.text)] == [0, 1, 2]
        models.does["b"] = {"load_s": 0.4}
        answer = await client.post(CHAT, json={"model": "b", "stream": True, "status": 400})
        assert answer.status_code == 200
        assert events_of(answer.text)[-1]["error"]["message"] == "as asked"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_stream_that_breaks_ends_with_an_error_of_its_api(several: Make, path: str) -> None:
    async with served(several()) as (_, client):
        body = {"model": "a", "stream": True, "die_after": 1, "pause_s": 0.05}
        answer = await client.post(path, json=body, headers=ANTHROPIC)
        last = events_of(answer.text)[-1]
        said = last if path == RESPONSES else last["error"]
        assert said["retry_after_s"] == 1
        if path == CHAT:
            assert last["error"]["code"] == "model_ended"
        else:
            assert last["type"] == "error"
            assert "event: error\n" in answer.text
        if path == RESPONSES:
            assert (last["code"], last["sequence_number"]) == ("model_ended", 2)
        if path == MESSAGES:
            assert last["error"]["type"] == "overloaded_error"


async def test_an_answer_that_breaks_before_it_begins_is_a_503_and_a_whole_one_is_cut_off(
    several: Make,
) -> None:
    async with served(several()) as (_, client):
        answer = await client.post(CHAT, json={"model": "a", "die": 9})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post(CHAT, json={"model": "a", "die_after": 0, "pause_s": 0.05})


async def test_a_request_waits_for_its_model_only_so_long(several: Make) -> None:
    models = several(models={"load_timeout_s": 0.1}, does={"a": {"load_s": 1}})
    async with served(models) as (_, client):
        answer = await client.post(CHAT, json={"model": "a"})
        assert answer.json()["error"]["code"] == "model_loading"
        await eventually(lambda: models.model("a").loaded)
        assert (await client.post(CHAT, json={"model": "a"})).status_code == 200


async def test_a_client_that_leaves_ends_its_request_and_not_the_load(several: Make) -> None:
    async with served(several(does={"a": {"load_s": 0.5}})) as (models, client):
        with pytest.raises(httpx2.ReadTimeout):
            await client.post(CHAT, json={"model": "a"}, timeout=0.2)
        await eventually(lambda: models.model("a").users == 0)
        await eventually(lambda: models.model("a").loaded)
        with pytest.raises(httpx2.ReadTimeout):
            await client.post(CHAT, json={"model": "a", "pause_s": 60}, timeout=0.2)
        await eventually(lambda: models.model("a").users == 0)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b'{"model": "a"}', {}, 415),
        (b'{"model": ', {"content-type": "application/json"}, 400),
        (b'{"model": 3}', {"content-type": "application/json"}, 400),
        (b'{"model": "nobody"}', {"content-type": "application/json"}, 404),
        (b"{}", {"content-type": "application/json"}, 404),
        (
            b'{"model": "a", "x": [' + b"1," * 40_000 + b"1]}",
            {"content-type": "application/json"},
            400,
        ),
    ],
)
async def test_what_no_model_would_answer_loads_none(
    several: Make, body: bytes, headers: dict[str, str], status: int
) -> None:
    async with served(several()) as (models, client):
        answer = await client.post(CHAT, content=body, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert all(model.process is None for model in models.models.models.values())


async def test_who_names_no_model_gets_the_one_that_was_used_last(several: Make) -> None:
    models = several(models={"aliases": {"gpt-*": "loaded", "small": "b"}, "keep_alive_s": 0})
    async with served(models) as (_, client):
        for asked, meant in ((None, "a"), ("gpt-5", "a"), ("small", "b"), (None, "b"), ("a", "a")):
            if asked is None and meant == "a":
                await client.post(CHAT, json={"model": "a"})
            models.clock.now += 1
            answer = await client.post(CHAT, json={"model": asked} if asked else {})
            assert answer.json()["name"] == meant


async def test_models_are_listed_as_each_api_has_them(several: Make) -> None:
    async with served(several()) as (_, client):
        await client.post(CHAT, json={"model": "b"})
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(entry["id"], entry["loaded"]) for entry in listed] == [
            ("a", False),
            ("b", True),
            ("c", False),
        ]
        assert {entry["context_length"] for entry in listed} == {64}
        one = (await client.get("/v1/models/c")).json()
        assert (one["id"], one["max_model_len"]) == ("c", 64)
        theirs = (await client.get("/v1/models", headers=ANTHROPIC)).json()
        assert (theirs["first_id"], theirs["last_id"]) == ("a", "c")
        assert {entry["max_input_tokens"] for entry in theirs["data"]} == {64}
        assert (await client.get("/v1/models/d")).status_code == 404


async def test_a_list_without_models_is_a_list(several: Make) -> None:
    async with served(several(names=[])) as (_, client):
        assert (await client.get("/v1/models")).json()["data"] == []
        theirs = (await client.get("/v1/models", headers=ANTHROPIC)).json()
        assert (theirs["data"], theirs["first_id"]) == ([], None)


async def test_a_stored_response_is_found_at_its_model(several: Make) -> None:
    async with served(several()) as (_, client):
        for model in ("a", "b"):
            await client.post(CHAT, json={"model": model})
        for method in ("GET", "DELETE"):
            answer = await client.request(method, "/v1/responses/resp_a")
            assert answer.json()["name"] == "a"
        assert (await client.get("/v1/responses/resp_z")).status_code == 404


async def test_the_front_holds_no_more_than_all_bodies_may_take(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_guard, "MAX_ALL_BODIES_BYTES", 5000)
    async with served(several(settings={"limits": {"max_body_bytes": 3000}})) as (models, client):
        large = {"model": "a", "x": "x" * 2800}
        slow = asyncio.create_task(client.post(CHAT, json=large | {"pause_s": 0.5}))
        await eventually(lambda: "a" in models.models.models and models.model("a").loaded)
        refused = await client.post(CHAT, json=large)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await slow).status_code == 200
        assert (await client.post(CHAT, json=large)).status_code == 200


ODD_IDS = [
    *(
        "a%20b",
        "%0d%0aX:%20y",
        "%c3%a9",
        "%00",
        "%ff",
        "%0a",
        "a%2Fb",
        "%2e%2e%2fmetrics%3f",
        "a.b",
    ),
    *("%3Fx=", "a;b", "a%25", "x" * 64, "resp_%61", "a:b", "~", "%E2%80%AE", "a+b", "$", "()"),
]


@pytest.mark.parametrize("odd", ODD_IDS)
async def test_an_odd_id_of_a_response_is_found_nowhere_and_not_asked_for(
    several: Make, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    async def get(*_: object) -> None:
        raise AssertionError("it was asked for")

    async with served(several()) as (_, client):
        await client.post(CHAT, json={"model": "a"})
        monkeypatch.setattr(ModelProcess, "get", get)
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/x")):
            path = f"/v1/responses/{odd}a{rest}"
            answer = await client.request(method, path)
            other = method == "DELETE" and "%2F" in odd.upper()  # two segments, once decoded
            assert answer.status_code == (405 if other else 404)


async def test_a_target_is_forwarded_as_it_came(several: Make) -> None:
    async with served(several()) as (_, client):
        await client.post(CHAT, json={"model": "a"})
        target = "/v1/responses/resp_a/x%20y%2e%2e%c3%a9/a?after=%0d%0a"
        answer = await client.get(target)
        assert (answer.status_code, answer.json()["target"]) == (200, target)


async def test_a_process_that_does_not_say_whether_it_has_a_response_is_no_fault(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(several()) as (models, client):
        for model in ("a", "b"):
            await client.post(CHAT, json={"model": model})
        monkeypatch.setattr("server.supervisor.process.QUESTION_TIMEOUT_S", 1.5)
        os.kill(models.pid("a"), signal.SIGSTOP)
        assert (await client.get("/v1/responses/resp_b")).json()["name"] == "b"
        answer = await client.get("/v1/responses/resp_z")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_ended")
        os.kill(models.pid("a"), signal.SIGKILL)
        for _ in range(20):
            assert (await client.get("/v1/responses/resp_z")).status_code in (404, 503)


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        *((CHAT, False), (CHAT, True), (MESSAGES, False), (RESPONSES, True), ("/api/chat", False)),
        *(("/v1/completions", True), ("/v1/embeddings", False), ("/memory", None)),
    ],
)
async def test_a_fault_of_the_front_is_said_with_its_places_and_counted(
    several: Make, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool | None
) -> None:
    def faulty(*_: object) -> None:
        raise AssertionError("a secret")

    async with served(several()) as (_, client):
        await client.post(CHAT, json={"model": "a"})
        monkeypatch.setattr(ModelSupervisor, "running", faulty)
        with capture_logs() as entries:
            if stream is None:
                answer = await client.get(path)
            else:
                answer = await client.post(path, json={"model": "a", "stream": stream})
        assert answer.status_code == 500
        failed, line = (entry for entry in entries if entry["event"].startswith("request"))
        assert (failed["endpoint"], failed["at"][0]) == (path, "AssertionError")
        assert (line["status"], line["model"], line["error"]) == (500, "a", "internal_error")
        assert "secret" not in str(entries)
        counted = f'quire_requests_total{{endpoint="{path}",status="500"}} 1.0'
        assert counted in (await client.get("/metrics")).text.splitlines()


@pytest.mark.parametrize(
    ("does", "body", "status", "error"),
    [
        ({}, {"die": 9}, 503, "model_ended"),
        ({"load_s": 0.3}, {"die": 9, "stream": True}, 200, "model_ended"),
        ({}, {"stream": True, "die_after": 1, "pause_s": 0.05}, 200, "model_ended"),
        ({}, {"die_after": 0, "pause_s": 0.05}, 200, "model_ended"),
        ({"fail": "it is broken"}, {}, 503, "model_not_loaded"),
        ({"load_s": 0.3, "fail": "broken"}, {"stream": True}, 200, "model_not_loaded"),
        ({"load_s": 2}, {}, 503, "model_loading"),
    ],
)
async def test_an_error_that_no_model_can_tell_is_said_and_counted_once(
    several: Make, does: dict[str, Any], body: dict[str, Any], status: int, error: str
) -> None:
    settings = {"server": {"sse_ping_s": 0.05}}
    limit_s = 1.5 if error == "model_loading" else DEADLINE_S
    models = several(models={"load_timeout_s": limit_s}, settings=settings, does={"a": does})
    async with served(models) as (_, client):
        with capture_logs() as entries, suppress(httpx2.RemoteProtocolError):
            await client.post(CHAT, json={"model": "a"} | body)
        await eventually(lambda: any(entry["event"] == "request" for entry in entries))
        (line,) = (entry for entry in entries if entry["event"] == "request")
        assert (line["status"], line["model"], line["error"]) == (status, "a", error)
        counted = f'quire_requests_total{{endpoint="{CHAT}",status="{status}"}} 1.0'
        assert counted in (await client.get("/metrics")).text.splitlines()


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"status": 400}])
async def test_what_a_model_answers_is_observed_by_its_process_alone(
    several: Make, body: dict[str, Any]
) -> None:
    settings = {"server": {"sse_ping_s": 0.05}}
    async with served(several(settings=settings, does={"a": {"load_s": 0.3}})) as (models, client):
        with capture_logs() as entries:
            await client.post(CHAT, json={"model": "a"} | body)
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(CHAT, json={"model": "a", "pause_s": 60}, timeout=0.2)
            await eventually(lambda: models.model("a").users == 0)
        assert not any(entry["event"].startswith("request") for entry in entries)
        assert f'endpoint="{CHAT}"' not in (await client.get("/metrics")).text


async def test_metrics_are_of_the_front_and_of_every_model(several: Make) -> None:
    async with served(several(settings={"access": {"api_keys": [KEY]}})) as (_, client):
        client.headers["authorization"] = f"Bearer {KEY}"
        await client.post(CHAT, json={"model": "a"})
        page = (await client.get("/metrics")).text
        lines = page.splitlines()
        assert 'own_total{model="other"} 1.0' in lines
        assert 'quire_requests_total{endpoint="/x",model="a"} 2.0' in lines
        assert 'quire_model_loaded_ratio{model="a"} 1.0' in lines
        assert 'quire_model_memory_bytes{kind="kv",model="a"} 50.0' in lines
        assert sum(line.startswith("# TYPE quire_requests_total") for line in lines) == 1
        assert not any('endpoint="/v1/chat/completions"' in line for line in lines), "the model's"


async def test_a_model_that_does_not_show_its_metrics_is_left_out(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.supervisor.process.QUESTION_TIMEOUT_S", 0.0)
    async with served(several()) as (_, client):
        await client.post(CHAT, json={"model": "a"})
        page = (await client.get("/metrics")).text
        assert "own_total" not in page
        assert 'quire_model_loads_total{model="a"} 1.0' in page


async def test_the_memory_is_that_of_the_model_which_is_named(several: Make) -> None:
    async with served(several()) as (_, client):
        for model in ("a", "b"):
            await client.post(CHAT, json={"model": model})
        assert (await client.get("/memory")).json()["name"] == "a"
        assert (await client.get("/memory?model=b")).json()["name"] == "b"
        answer = await client.get("/openapi.json?model=c")
        assert (answer.status_code, "not loaded" in answer.text) == (503, True)


async def test_the_state_of_a_model_is_told_while_it_is_away_and_loads(several: Make) -> None:
    async with served(several(does={"a": {"load_s": 0.5}})) as (models, client):

        async def told(model: str) -> list[Any]:
            memory = (await client.get(f"/memory?model={model}")).json()
            listed = (await client.get(f"/v1/models/{model}")).json()
            assert (memory["model"], memory["map"], memory["requests"]) == (model, None, [])
            states = [[each[field] for field in STATE] for each in (memory, listed)]
            assert states[0] == states[1]
            return states[0]

        assert await told("c") == [False, None, None]
        task = asyncio.create_task(models.models.load(models.model("a")))
        await eventually(lambda: models.model("a").loading is not None)
        models.clock.now += 12
        assert await told("a") == [False, None, 12.0]
        await task
        models.clock.now += 3
        listed = (await client.get("/v1/models/a")).json()
        assert [listed[field] for field in STATE] == [True, 3.0, None]


async def test_operators_and_browsers_find_what_they_look_for(several: Make) -> None:
    async with served(several()) as (models, client):
        assert (await client.get("/version")).json()["name"] == "quire"
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert (await client.head("/api/hello")).status_code == 200
        page = await client.get("/", headers={"accept": "text/html"})
        assert page.text.startswith("<!doctype html>")
        slow = asyncio.create_task(client.post(CHAT, json={"model": "a", "pause_s": 0.5}))
        await eventually(lambda: "a" in models.models.models and models.model("a").loaded)
        models.front.drain.begin()
        assert (await client.get("/health")).json() == {"status": "draining"}
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post(CHAT, json={"model": "a"})).status_code == 503
        assert (await slow).status_code == 200, "it may end"


async def test_guards_stand_before_all_models(several: Make) -> None:
    async with served(several(settings={"access": {"api_keys": [KEY]}})) as (models, client):
        assert (await client.post(CHAT, json={"model": "a"})).status_code == 401
        headers = {"authorization": f"Bearer {KEY}", "host": "evil.example"}
        assert (await client.post(CHAT, json={"model": "a"}, headers=headers)).status_code == 403
        assert all(model.process is None for model in models.models.models.values())


async def test_short_names_that_come_along_count_and_the_settings_before_them(
    several: Make,
) -> None:
    name = "mlx-community/Qwen3-4B-4bit"
    models = several(names=[name, "b"], models={"aliases": {"qwen3:8b": "b"}})
    async with served(models) as (_, client):
        for asked, meant in (("qwen3:4b", name), ("qwen3:8b", "b")):
            answer = await client.post(CHAT, json={"model": asked})
            assert answer.json()["name"] == meant


async def test_a_machine_stays_awake_while_others_may_ask_and_sleeps_afterwards(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.supervisor.front.AWAKE_POLL_S", 0.01)
    power, models = Machine(), several()
    models.front.awake = KeepAwake(power, others_may_ask=True)
    async with served(models) as (_, client):
        assert power.held == []
        power.mains = True
        await eventually(lambda: len(power.held) == 1)
        power.mains = False
        await eventually(lambda: power.held == [])
        await client.post(CHAT, json={"model": "a"})
        async with models.models.use(models.model("a"), b"somebody"):
            await eventually(lambda: len(power.held) == 1)
    assert power.held == []


MODELS = (
    "mlx-community/Qwen3-4B-4bit",
    "Qwen/Qwen3-0.6B",
    "own",
    "other/Qwen3-0.6B",
    "Same",
    "same",
)
ALIASES = {"gpt-*": "loaded", "fast": "own", "gone": "no/such"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("mlx-community/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("Qwen3-4B-4bit:latest", "mlx-community/Qwen3-4B-4bit"),
        ("Qwen3-4B-4bit/", "mlx-community/Qwen3-4B-4bit"),
        ("whoever/own", "own"),
        ("whoever/Qwen3-4B-4bit", None),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6B", None),  # two are called so
        ("fast", "own"),
        ("gone", None),
        ("gpt-5", "at/hand"),
        ("claude", None),
        ("MLX-Community/qwen3-4b-4BIT", "mlx-community/Qwen3-4B-4bit"),
        ("qwen3-4b-4bit:latest", "mlx-community/Qwen3-4B-4bit"),
        ("OWN", "own"),
        ("Fast", "own"),
        ("GPT-5", "at/hand"),
        ("other/qwen3-0.6b", "other/Qwen3-0.6B"),
        ("Same", "Same"),
        ("same", "same"),
        ("SAME", None),  # two are called so
        ("", "at/hand"),
        (None, "at/hand"),
        (":latest", "at/hand"),
    ],
)
def test_a_name_means_one_model_or_none(written: str | None, meant: str | None) -> None:
    assert match_name(written, MODELS, ALIASES, "at/hand") == meant
