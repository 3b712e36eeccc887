"""A model with recurrent layers behind the API: what its states are for, and why one is missing."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.client import EngineClient
from server.text.tokenizer import Tokenizer
from tests.engine.hybrid_engines import hybrid_loop, load_hybrid
from tests.engine.models.hybrids import write_hybrid
from tests.engines import started
from tests.server.harness import CHAT, COMPLETIONS, DEADLINE_S, eventually, prompt, serving
from tests.server.metrics.scraping import Samples, scrape, value

BLOCK = 8
KEEPS = ("waypoint", "end", "user", "system")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture
def client(folder: Path) -> Iterator[EngineClient]:
    made = started(
        lambda emit: hybrid_loop(*load_hybrid(folder), emit, max_len=512, kv_budget_bytes=4 << 20)
    )
    yield made
    made.stop(DEADLINE_S)


@pytest.fixture
async def http(client: EngineClient, folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with serving(client, Tokenizer(folder)) as (_, http):
        yield http


async def cached(http: httpx2.AsyncClient, text: str, **fields: Any) -> tuple[int, str | None]:
    """How many tokens of a text came from the cache, and why no more."""
    body = prompt(text, max_tokens=1, cache_report=True, **fields)
    found = (await http.post(COMPLETIONS, json=body)).json()["usage"]["prompt_tokens_details"]
    miss = found["cache_miss"]
    assert miss is None or found["cached_tokens"] <= miss["left_at"]
    return found["cached_tokens"], miss and miss["reason"]


async def test_a_miss_for_want_of_a_state_says_so(http: httpx2.AsyncClient) -> None:
    first, second, third = ("a" * 50 + other * 40 for other in "bcd")
    assert await cached(http, first) == (0, "never_cached")
    assert await cached(http, second) == (0, "no_state")
    assert await cached(http, third) == (50 // BLOCK * BLOCK, "never_cached")
    for number in range(30):
        await cached(http, chr(ord("A") + number) * 40)
    assert await cached(http, "a" * 50 + "e" * 40) == (0, "state_evicted")
    samples = await scrape(http)
    counted = {
        reason: value(samples, "quire_prefix_misses_total", reason=reason)
        for reason in ("no_state", "state_evicted", "evicted")
    }
    assert counted == {"no_state": 1, "state_evicted": 1, "evicted": 0}
    assert value(samples, "quire_state_slots_evicted_total") > 0


def parts(samples: Samples) -> float:
    kept = [value(samples, "quire_state_slots_cached", keep=keep) for keep in KEEPS]
    names = ("free", "held", "waiting")
    return sum(kept) + sum(value(samples, f"quire_state_slots_{name}") for name in names)


async def test_a_conversation_keeps_states_that_the_figures_and_the_map_show(
    http: httpx2.AsyncClient, client: EngineClient
) -> None:
    messages = [{"role": "system", "content": "Be brief and kind."}]
    found: dict[str, Any] = {}
    for question in ("Hello", "Why?", "And then?"):
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": 20, "n": 2}
        found = (await http.post(CHAT, json=body)).json()
        messages.append(found["choices"][0]["message"])
        samples = await scrape(http)
        assert parts(samples) == value(samples, "quire_state_slots") > 0
    usage = found["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] // 2
    await eventually(lambda: client.stats.kv is not None and client.stats.kv.slots.held == 0)
    await eventually(lambda: bool(client.stats.kv and client.stats.kv.slots.committed_bytes))
    samples = await scrape(http)
    assert parts(samples) == value(samples, "quire_state_slots")
    assert value(samples, "quire_kv_copied_bytes_total") == 0
    charged = value(samples, "quire_state_committed_bytes")
    assert charged <= value(samples, "quire_state_slots") * value(samples, "quire_state_slot_bytes")
    assert charged < value(samples, "quire_kv_committed_bytes")
    told = (await http.get("/memory")).json()["map"]
    slots = told["slots"]
    assert told["pool"]["slots"]["slots"] == value(samples, "quire_state_slots")
    assert len(slots) == sum(told["pool"]["slots"]["cached"].values())
    assert {slot["keep"] for slot in slots} >= {"system", "user", "end"}
    assert len({slot["conversation"] for slot in slots}) == 1
    assert all(slot["position"] % BLOCK == 0 < slot["position"] for slot in slots)
