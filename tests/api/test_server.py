"""What all APIs do in a server that is full, slow, at its end or in the middle of a talk."""

import asyncio
import json
from itertools import pairwise

import httpx2
import pytest

from server.config import Config, ServerSection
from server.text.conversation import ToolCall, Turn
from server.text.tokenizer import Tokenizer
from tests.api.conftest import Server
from tests.api.table import ALL, CHAT, COMPLETIONS, FOUR, MESSAGES, RESPONSES
from tests.api.wire import HELLO, Api, Ask, read_named_events
from tests.api.words import BOTH, call, think
from tests.server.harness import END, Connection, eventually, ids_of, own_engine, token_id

ONE = Ask(length=1)
LONG = Ask((Turn("user", "x" * 40),), length=1)  # more than a block of the cache
TURN = think("Hm.", f"Sure.\n{call('look', at='a')}")
PING_S = 0.02
BUSY = {"rate_limit_error", ""}
ENDED = {"server_error", "overloaded_error", ""}


async def refuse(http: httpx2.AsyncClient, status: int, kinds: set[str]) -> httpx2.Response:
    """Every API refuses a good request, in its own words."""
    for api in ALL:
        response = await http.post(api.path, json=api.write(ONE))
        error = api.read_error(response)
        assert (error.status, error.kind in kinds) == (status, True), (api, error)
    return response


async def test_a_full_queue_says_when_to_come_again(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer, closed=True, max_num_seqs=1, max_queue=0) as served:
        engine, app, http = served
        api = FOUR[0]
        first = Connection(app, api.path, api.write(ONE))
        await eventually(lambda: engine.client.in_flight == 1)
        response = await refuse(http, 429, BUSY)
        assert response.headers["retry-after"] == "1"
        engine.gate.open()
        await first.end()
        assert (await http.post(api.path, json=api.write(ONE))).status_code == 200


async def test_an_engine_that_has_ended_answers_nobody(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer) as (engine, _, http):
        engine.stop()
        await refuse(http, 503, ENDED)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ALL, ids=repr)
async def test_fault_08_a_fault_of_the_engine_is_never_a_normal_end(
    tokenizer: Tokenizer, api: Api, streamed: bool
) -> None:
    async with own_engine(tokenizer, failing=token_id(tokenizer, "#")) as (engine, _, http):
        engine.script[:] = ids_of(tokenizer, "abc#d")
        body = api.write(Ask())
        response = await http.post(api.path, json=api.with_stream(body) if streamed else body)
    if streamed:
        assert response.status_code == 200
        error = api.read_late_error(response.text)["error"]
        kind, message = error["type"], error["message"]
    else:
        told = api.read_error(response)
        assert (told.status, response.headers["x-should-retry"]) == (500, "false")
        kind, message = told.kind, told.message
    assert kind in ("server_error", "api_error", "")
    assert message.startswith("Generation failed: a step of the engine failed")


@pytest.mark.parametrize("api", ALL, ids=repr)
async def test_a_stream_that_waits_gives_signs_of_life(tokenizer: Tokenizer, api: Api) -> None:
    config = Config(server=ServerSection(sse_ping_s=PING_S))
    async with own_engine(tokenizer, config, closed=True) as (engine, app, _):
        connection = Connection(app, api.path, api.with_stream(api.write(Ask(length=2))))
        await eventually(lambda: connection.body.count(b"\n") > 6)
        waited = connection.body
        engine.gate.open()
        await connection.end()
        if api.media_type == "text/event-stream":
            assert b": waiting\n\n" in waited
        else:
            assert not any(json.loads(line)["done"] for line in waited.splitlines())
        assert api.read_stream(connection.body.decode()).tokens == 2


@pytest.mark.parametrize("api", ALL, ids=repr)
async def test_who_wants_a_whole_answer_waits_in_silence(tokenizer: Tokenizer, api: Api) -> None:
    config = Config(server=ServerSection(sse_ping_s=PING_S))
    async with own_engine(tokenizer, config, closed=True) as (engine, app, _):
        connection = Connection(app, api.path, api.write(Ask(length=2)))
        await asyncio.sleep(3 * PING_S)
        assert connection.sent == []
        engine.gate.open()
        await connection.end()
        assert api.read_whole(json.loads(connection.body)).tokens == 2


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ALL, ids=repr)
async def test_who_leaves_is_not_answered_any_more(
    tokenizer: Tokenizer, api: Api, streamed: bool
) -> None:
    async with own_engine(tokenizer, closed=True) as (engine, app, _):
        body = api.write(Ask())
        connection = Connection(app, api.path, api.with_stream(body) if streamed else body)
        await eventually(lambda: engine.client.in_flight == 1)
        connection.leave()
        await connection.end()
        engine.gate.open()
        await eventually(lambda: engine.client.in_flight == 0)
        assert connection.status == (200 if streamed else 499)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("api", FOUR, ids=repr)
async def test_a_talk_goes_on_where_the_answer_ended(server: Server, api: Api) -> None:
    """All of the prompt and of the answer is the beginning of the next prompt."""
    turns: tuple[Turn, ...] = (Turn("system", "Be brief."), HELLO)
    server.says(TURN)
    for _ in range(3):
        answer, _ = await server.ask(api, api.write(Ask(turns, tools=BOTH)))
        (name, arguments), call_id = answer.calls[0], answer.ids[-1]
        made = ToolCall(call_id, name, json.dumps(arguments))
        spoken = Turn("assistant", answer.text, answer.thoughts, (made,))
        turns = (*turns, spoken, Turn("tool", "sunny", tool_call_id=call_id))
    prompts = list(map(server.read_prompt, server.heard))
    for before, after in pairwise(prompts):
        assert after.startswith(before + TURN + END)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("api", ALL, ids=repr)
async def test_threat_15_only_equal_keys_and_salts_share(server: Server, api: Api) -> None:
    keys: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer a"},
        {"authorization": "bearer a"},
        {"x-api-key": "a"},
        {"authorization": "Bearer b"},
    ]
    for headers in keys:
        for salt in ({}, {"cache_salt": None}, {"cache_salt": "a"}, {"cache_salt": "b"}):
            response = await server.post(api, api.write(ONE) | salt, headers=headers)
            assert response.status_code == 200
    salts = [request.salt for request in server.heard]
    assert len(salts) == len(keys) * 4
    assert len({salt.tenant for salt in salts}) == 3
    assert len({salt.client for salt in salts}) == 3
    assert len(set(salts)) == 9
    assert salts[4:8] == salts[8:12] == salts[12:16]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_the_cache_did_not_have_is_reported_where_it_is_wanted(
    tokenizer: Tokenizer, streamed: bool
) -> None:
    miss = '"cache_miss":{"left_at":0,"reason":"never_cached","message":"nobody'
    async with own_engine(tokenizer) as (_, _, http):
        for api in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
            for report in (True, False):
                body = api.write(LONG) | {"cache_report": report, "cache_salt": f"{api}, {report}"}
                wanted = api.with_stream(body) if streamed else body
                response = await http.post(api.path, json=wanted)
                assert (miss in response.text) is report, response.text


async def test_a_response_that_failed_is_not_stored(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer, failing=token_id(tokenizer, "#")) as (engine, _, http):
        engine.script[:] = ids_of(tokenizer, "abc#d")
        body = RESPONSES.with_stream(RESPONSES.write(Ask()))
        failed = read_named_events((await http.post(RESPONSES.path, json=body)).text)[-1]
        stored = await http.get(f"{RESPONSES.path}/{failed['response']['id']}")
        assert (failed["type"], stored.status_code) == ("response.failed", 404)
        parts = [part for item in failed["response"]["output"] for part in item["content"]]
        text = "".join(part["text"] for part in parts)
        assert "abc#".startswith(text), "the fault may overtake tokens"
