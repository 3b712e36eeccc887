from datetime import datetime
from urllib.parse import unquote

import httpx2
import pytest
from anthropic.types import ModelInfo

from server.routes.service import Service
from tests.server.harness import MODEL


async def test_the_model_is_listed_with_its_context(
    http: httpx2.AsyncClient, service: Service
) -> None:
    found = (await http.get("/v1/models")).json()
    assert found == {
        "object": "list",
        "data": [
            {
                "id": MODEL,
                "object": "model",
                "created": int(service.model.facts.modified_at.timestamp()),
                "owned_by": "quire",
                "max_model_len": 400,
                "context_length": 400,
            }
        ],
    }


@pytest.mark.parametrize("base", ["/v1/models", "/models"])
@pytest.mark.parametrize("end", ["", "?", "/", "/?", "%3F", "?limit=5"])
async def test_the_list_is_found_however_its_address_ends(
    http: httpx2.AsyncClient, base: str, end: str
) -> None:
    response = await http.get(base + end)
    assert (response.status_code, response.json()["data"][0]["id"]) == (200, MODEL)


@pytest.mark.parametrize(
    "path",
    [
        *(MODEL, "org/alias", "org%2Falias", "/models/alias", "%2Fmodels%2Falias"),
        *("alias", "alias/", "org/alias/", "mine/recall"),
    ],
)
@pytest.mark.parametrize("base", ["/v1", ""])
async def test_the_model_is_found_by_all_of_its_names(
    http: httpx2.AsyncClient, base: str, path: str
) -> None:
    (entry,) = (await http.get("/v1/models")).json()["data"]
    response = await http.get(f"{base}/models/{path}")
    assert (response.status_code, response.json()) == (200, entry)


@pytest.mark.parametrize("path", ["/v1/models", "/models/", f"/v1/models/{MODEL}"])
async def test_who_only_wants_to_know_whether_it_is_there_is_told(
    http: httpx2.AsyncClient, path: str
) -> None:
    found, head = await http.get(path), await http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == found.headers["content-length"]


async def test_anthropics_clients_are_shown_the_model_as_anthropic_does(
    http: httpx2.AsyncClient,
) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await http.get("/v1/models", headers=headers)).json()
    assert {**listed, "data": None} == {
        "data": None,
        "has_more": False,
        "first_id": MODEL,
        "last_id": MODEL,
    }
    (model,) = listed["data"]
    assert {**model, "created_at": None} == {
        "type": "model",
        "id": MODEL,
        "display_name": MODEL,
        "created_at": None,
        "lifecycle": "active",
        "max_input_tokens": 400,
        "max_tokens": 100,
    }
    assert ModelInfo.model_validate(model).max_input_tokens == 400
    assert datetime.fromisoformat(model["created_at"]).tzinfo is not None
    found = await http.get("/v1/models/org/alias", headers=headers)
    assert found.json() == model
    missing = await http.get("/v1/models/gpt-5", headers=headers)
    assert (missing.status_code, missing.json()["type"]) == (404, "error")


@pytest.mark.parametrize("name", ["gpt-5", "org", "mine/org", "a/b/c", "\N{SNOWMAN}", "%20"])
async def test_another_model_is_a_404(http: httpx2.AsyncClient, name: str) -> None:
    response = await http.get(f"/v1/models/{name}")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert unquote(name) in error["message"]
