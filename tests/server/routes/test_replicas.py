"""GET /cluster/replicas."""

from dataclasses import replace

import httpx2

from server.routes.operations import REPLICAS as PATH
from server.text.tokenizer import Tokenizer
from tests.server.harness import MODEL, Engine, http_client, make_service, running


async def test_replicas_are_listed_and_the_list_is_found(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    there: list[dict[str, object]] = [
        {"name": "a", "host": "here", "state": "up", "heard_s_ago": 0.25, "running": 2},
        {"name": "b", "host": None, "state": "starting", "heard_s_ago": None},
    ]
    service = replace(make_service(engine.client, tokenizer), replicas=lambda: list(there))
    async with running(service) as app, http_client(app) as http:
        assert (await http.get("/version")).json()["replicas"] == PATH
        response = await http.get(PATH)
        assert response.headers["cache-control"] == "no-store"
        told = response.json()
        assert told["model"] == MODEL
        assert told["replicas"] == there
        there.pop()
        assert len((await http.get(PATH)).json()["replicas"]) == 1
        schema = (await http.get("/openapi.json")).json()["paths"]
        assert "replicas" in schema[PATH]["get"]["description"]


async def test_a_server_that_is_alone_has_no_such_list(http: httpx2.AsyncClient) -> None:
    assert (await http.get(PATH)).status_code == 404
    assert "replicas" not in (await http.get("/version")).json()
