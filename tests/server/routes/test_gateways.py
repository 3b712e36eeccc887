"""What gateways ask before they send requests."""

import asyncio
from typing import Any

import httpx2
import pytest

from engine.figures import EngineStats
from tests.server.harness import CHAT, MODEL, Engine, chat, eventually


def nobody_holds_any(engine: Engine) -> bool:
    """Whether all blocks are free, or cached for others."""
    kv = engine.client.stats.kv
    return kv is not None and kv.used_bytes == 0


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


@pytest.mark.parametrize("path", ["/v1/loads", "/loads"])
async def test_a_gateway_is_told_how_much_there_is_to_do(
    engine: Engine, http: httpx2.AsyncClient, path: str
) -> None:
    async def load() -> dict[str, Any]:
        said = (await http.get(path)).json()
        assert said["dp_rank_count"] == len(said["loads"]) == 1
        return dict(said["loads"][0])

    engine.gate.close()
    asking = asyncio.create_task(http.post(CHAT, json=chat(max_tokens=40)))
    await eventually(lambda: engine.gate.entered > 0)
    while engine.client.stats.running == 0:  # which is told a few times a second
        await asyncio.sleep(0.05)
        await engine.step()
    during = await load()
    engine.gate.open()
    prompt_tokens = (await asking).json()["usage"]["prompt_tokens"]
    engine.rest()
    assert (during["num_running_reqs"], during["num_waiting_reqs"]) == (1, 0)
    assert prompt_tokens <= during["num_used_tokens"] < during["max_total_num_tokens"]
    share = during["num_used_tokens"] / during["max_total_num_tokens"]
    assert during["token_usage"] == share
    # Blocks are free when the device is through with them.
    await eventually(lambda: nobody_holds_any(engine))
    after = await load()
    assert after["num_total_reqs"] == after["num_used_tokens"] == after["token_usage"] == 0


async def test_a_server_without_figures_says_nothing_of_its_memory(
    engine: Engine, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine.client), "stats", EngineStats())
    (load,) = (await http.get("/v1/loads")).json()["loads"]
    assert load["num_total_reqs"] == 0
    assert "token_usage" not in load
