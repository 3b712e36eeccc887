"""What gateways ask before they send requests."""

import httpx2
import pytest

from tests.server.harness import MODEL


@pytest.mark.parametrize("prefix", ["", "get_"])
async def test_a_gateway_is_told_the_model_and_its_context(
    http: httpx2.AsyncClient, prefix: str
) -> None:
    model = (await http.get(f"/{prefix}model_info")).json()
    assert model == {"model_path": MODEL, "is_generation": True}
    server = (await http.get(f"/{prefix}server_info")).json()
    listed = (await http.get("/v1/models")).json()["data"][0]
    assert server["served_model_name"] == MODEL
    assert server["context_length"] == listed["max_model_len"]
    assert server["max_running_requests"] > 0
