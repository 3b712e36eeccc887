"""What requests share: one prompt for several answers, and prefixes with whom they may."""

import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from engine.client import EngineClient, TokenStream
from engine.types import MissReason, PrefixReport, PromptBoundaries, Request, TokenEvent
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Connection,
    Engine,
    chat,
    events,
    eventually,
    ids_of,
    own_engine,
    posted,
    prompt,
    serving,
)

BODIES = {CHAT: chat, COMPLETIONS: prompt}
MISS = PrefixReport(cached_tokens=4, left_at=5, miss=MissReason.EVICTED)


@pytest.fixture(params=BODIES)
def path(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> PrefixReport:
    """What every request finds in the cache."""
    deliver = TokenStream.deliver

    def with_report(self: TokenStream, event: TokenEvent, made_s: float) -> None:
        deliver(self, event._replace(prefix=MISS), made_s)

    monkeypatch.setattr(TokenStream, "deliver", with_report)
    return MISS


async def answer(http: httpx2.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    return await posted(http, path, BODIES[path](**fields))


def text_of(choice: dict[str, Any]) -> str:
    found: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return found


# --- choices ---------------------------------------------------------------------------------


async def test_choices_have_their_numbers_and_the_first_is_that_of_a_request_for_one(
    http: httpx2.AsyncClient, path: str
) -> None:
    how: dict[str, Any] = {"temperature": 1.5, "seed": -2, "max_tokens": 12}
    found = await answer(http, path, n=3, **how)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length"] * 3
    assert len({text_of(choice) for choice in found["choices"]}) == 3
    alone = await answer(http, path, **how)
    assert found["choices"][0] == alone["choices"][0]
    assert found["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == 3 * 12
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + 3 * 12


async def test_a_stream_carries_all_choices_and_ends_once(
    http: httpx2.AsyncClient, path: str
) -> None:
    how: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 12}
    await answer(http, path, **how)
    whole = await answer(http, path, **how)
    body = BODIES[path](**how, stream=True, stream_options={"include_usage": True})
    text = (await http.post(path, json=body)).text
    assert text.count("[DONE]") == 1
    *chunks, last = events(text)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    found = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, choice in enumerate(whole["choices"]):
        own = [each for each in found if each["index"] == index]
        assert "".join(_piece(each) for each in own) == text_of(choice)
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["length"]
        assert own[-1]["finish_reason"] == "length"
        if path == CHAT:
            assert ["role" in each["delta"] for each in own] == [True] + [False] * (len(own) - 1)


def _piece(choice: dict[str, Any]) -> str:
    found: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return found


async def test_choices_come_side_by_side(tokenizer: Tokenizer, path: str) -> None:
    async with own_engine(tokenizer, closed=True) as (engine, app, _):
        connection = Connection(app, path, BODIES[path](n=2, max_tokens=50, stream=True))

        def said() -> list[int]:
            """Which choices have said something, in order."""
            blocks = connection.body.decode().split("\n\n")
            chunks = [json.loads(b.removeprefix("data: ")) for b in blocks if b.startswith("data:")]
            return [c["index"] for chunk in chunks for c in chunk["choices"] if _piece(c)]

        await eventually(lambda: engine.client.in_flight == 2)
        for _ in range(20):
            await engine.step()
        await eventually(lambda: min(said().count(0), said().count(1)) > 2)
        assert b"[DONE]" not in connection.body
        engine.gate.open()
        await connection.end()


@pytest.mark.parametrize(("path", "logprobs"), [(CHAT, True), (COMPLETIONS, 1)])
async def test_every_choice_has_its_own_log_probabilities(
    http: httpx2.AsyncClient, path: str, logprobs: Any
) -> None:
    how: dict[str, Any] = {"temperature": 1.5, "max_tokens": 6, "logprobs": logprobs}
    found = [
        choice["logprobs"] for choice in (await answer(http, path, n=2, seed=5, **how))["choices"]
    ]
    alone = [(await answer(http, path, seed=seed, **how))["choices"][0] for seed in (5, 6)]
    assert found == [choice["logprobs"] for choice in alone]
    assert found[0] != found[1]


async def test_a_stop_string_ends_the_choices_that_say_it(
    http: httpx2.AsyncClient, path: str
) -> None:
    how: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 12}
    before = [text_of(choice) for choice in (await answer(http, path, **how))["choices"]]
    stop = before[1][6:9]
    assert [stop in text for text in before] == [False, True, False]
    after = (await answer(http, path, **how, stop=stop))["choices"]
    assert [choice["finish_reason"] for choice in after] == ["length", "stop", "length"]
    assert [text_of(choice) for choice in after] == [
        before[0],
        before[1][: before[1].index(stop)],
        before[2],
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_of_one_choice_is_an_error_of_the_whole_answer(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, stream: bool
) -> None:
    how: dict[str, Any] = {"n": 2, "temperature": 1.5, "seed": 5, "max_tokens": 12}
    choices = (await answer(http, COMPLETIONS, **how, logprobs=0))["choices"]
    first, second = (choice["logprobs"]["tokens"] for choice in choices)
    word = next(word for word in second[3:] if word.startswith("w") and word not in first)
    async with own_engine(tokenizer, non_finite=tokenizer.fast.token_to_id(word)) as (_, app, _):
        connection = Connection(app, COMPLETIONS, prompt(**how, stream=stream))
        await connection.end()
    last = connection.body.decode().removesuffix("\n\n").rpartition("\n\n")[2]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "not finite" in error["message"]
    assert connection.status == (200 if stream else 500)
    assert b"[DONE]" not in connection.body


async def test_choices_need_a_place_each(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer, closed=True, max_num_seqs=1, max_queue=2) as served:
        engine, app, http = served
        held = Connection(app, CHAT, chat(max_tokens=2))
        await eventually(lambda: engine.client.in_flight == 1)
        assert (await http.post(CHAT, json=chat(n=3))).status_code == 429
        assert (await http.post(CHAT, json=chat(n=4))).json()["error"]["param"] == "n"
        assert engine.client.in_flight == 1
        both = Connection(app, CHAT, chat(n=2, max_tokens=2))
        await eventually(lambda: engine.client.in_flight == 3)
        engine.gate.open()
        for connection in (held, both):
            await connection.end()
            assert connection.status == 200


# --- with whom -------------------------------------------------------------------------------


async def test_replicas_share_prefixes_if_they_have_the_same_secret(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    found = []
    for secret in (b"one", b"one", b"other"):
        async with serving(engine.client, tokenizer, secret=secret) as (_, http):
            headers = {"authorization": "Bearer of-replicas"}
            body = chat("What do replicas know of each other? " * 3, max_tokens=1)
            usage = (await http.post(CHAT, json=body, headers=headers)).json()["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    assert found == [False, True, False]


async def test_the_engine_hears_which_tokens_belong_to_the_system_message(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, submitted: list[Request]
) -> None:
    developer = {"role": "developer", "content": "Be kind."}
    messages = [{"role": "system", "content": "Be brief."}, developer, *chat()["messages"]]
    body = {"messages": messages, "max_tokens": 1, "n": 2}
    assert (await http.post(CHAT, json=body)).status_code == 200
    head = "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n"
    await answer(http, CHAT, max_tokens=1)
    await answer(http, COMPLETIONS, max_tokens=1)
    wanted = len(ids_of(tokenizer, head))
    assert [request.boundaries.system_end for request in submitted] == [wanted, 0, 0]


@pytest.fixture(params=[True, False])
def keeps_states(
    request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether the engine does, from before the server is made on."""
    keeps: bool = request.param
    limits = replace(engine.client.limits, keeps_states=keeps)
    monkeypatch.setattr(EngineClient, "limits", limits)
    return keeps


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "n": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hello"}], "stream": False}),
    ],
)
async def test_an_engine_that_keeps_states_hears_where_the_next_prompt_may_leave_this_one(
    keeps_states: bool,
    http: httpx2.AsyncClient,
    tokenizer: Tokenizer,
    submitted: list[Request],
    path: str,
    body: dict[str, Any],
) -> None:
    most = {"max_output_tokens": 1} if path.endswith("responses") else {"max_tokens": 1}
    found = await http.post(path, json={"model": MODEL, **most, **body})
    assert found.status_code == 200, found.text
    end = len(ids_of(tokenizer, "<|im_start|>user\nHello<|im_end|>\n"))
    boundaries = PromptBoundaries(0, end, end) if keeps_states else PromptBoundaries()
    assert [request.boundaries for request in submitted] == [boundaries]


# --- what came of it -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_says_how_many_tokens_were_cached(
    http: httpx2.AsyncClient, path: str, reported: PrefixReport, n: int
) -> None:
    found = await answer(http, path, max_tokens=2, n=n)
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": reported.cached_tokens}
    found = await answer(http, path, max_tokens=2, n=n, cache_report=True)
    assert found["usage"]["prompt_tokens_details"] == {
        "cached_tokens": reported.cached_tokens,
        "cache_miss": {
            "left_at": reported.left_at,
            "reason": "evicted",
            "message": MissReason.EVICTED.message,
        },
    }


async def test_what_no_report_came_for_was_not_cached(
    http: httpx2.AsyncClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = TokenStream.deliver
    monkeypatch.setattr(
        TokenStream,
        "deliver",
        lambda self, event, made_s: deliver(self, event._replace(prefix=None), made_s),
    )
    found = await answer(http, path, max_tokens=2, cache_report=True)
    timings = found["usage"]["timings"]
    assert timings["first_token_s"] > 0
    assert timings["tokens_per_s"] > 0
    details = {"cached_tokens": 0, "cache_miss": None}
    assert found["usage"]["prompt_tokens_details"] == details


# --- token ids -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"n": 3}, {"stop": "w"}, {"logprobs": True}])
async def test_the_ids_of_all_tokens_are_told_where_they_are_wanted(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, path: str, how: dict[str, Any]
) -> None:
    how = how | {"temperature": 1.5, "seed": 5, "max_tokens": 12, "return_token_ids": True}
    if "logprobs" in how and path == COMPLETIONS:
        how |= {"logprobs": 1}
    whole = await answer(http, path, **how)
    several = whole["choices"]
    prompts = [whole.get("prompt_token_ids", one.get("prompt_token_ids")) for one in several]
    assert {len(ids) for ids in prompts} == {whole["usage"]["prompt_tokens"]}
    assert sum(len(one["token_ids"]) for one in several) == whole["usage"]["completion_tokens"]
    if path == COMPLETIONS:
        assert whole["prompt_token_ids"] == ids_of(tokenizer, "Once upon")
        two = await answer(http, path, prompt=["Once", "upon"], **how)
        assert "prompt_token_ids" not in two
        assert [one["prompt_token_ids"] for one in two["choices"][:: how.get("n", 1)]] == [
            ids_of(tokenizer, "Once"),
            ids_of(tokenizer, "upon"),
        ]
        assert all(one["prompt_token_ids"] == ids_of(tokenizer, "Once upon") for one in several)
        texts = [tokenizer.fast.decode(one["token_ids"]) for one in several]
        assert all(text.startswith(one["text"]) for text, one in zip(texts, several, strict=True))
    chunks = events((await http.post(path, json=BODIES[path](**how, stream=True))).text)
    for number, one in enumerate(several):
        parts = [
            (chunk, choice)
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == number
        ]
        assert [i for _, part in parts for i in part.get("token_ids", ())] == one["token_ids"]
        told = [
            chunk.get("prompt_token_ids", part.get("prompt_token_ids")) for chunk, part in parts
        ]
        assert told[0] == prompts[number]
        assert set(told[1:]) <= {None}
    silent = await answer(http, path, **how | {"return_token_ids": False})
    assert "token_ids" not in json.dumps(silent)
