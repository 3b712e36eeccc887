"""OpenAI's package sends what it expects of an answer, and reads what became of the drafts."""

from typing import Any, cast

import httpx2
import pytest
from openai import AsyncOpenAI

from engine.client import EngineClient
from engine.types import Drafting, DraftReport, EngineStats, FinishReason, Request
from server.text.encoder import Encoder
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, MODEL, chat, ids_of, posted, serving
from tests.server.streams import PreparedClient, token

CONTEXT = 400  # tokens; see tests.engines


def sdk(http: httpx2.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key="none",
        base_url="http://localhost/v1",
        http_client=http,
        max_retries=0,
        _strict_response_validation=True,
    )


def set_drafting(monkeypatch: pytest.MonkeyPatch, drafting: Drafting) -> None:
    monkeypatch.setattr(EngineClient, "stats", EngineStats(drafting=drafting))


async def test_the_engine_expects_the_tokens_of_a_prediction_and_answers_the_same(
    http: httpx2.AsyncClient,
    tokenizer: Tokenizer,
    submitted: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_drafting(monkeypatch, Drafting.RESTING)
    text, end, long = "Héllo <think>you</think>", "<|im_end|>", "ab" * CONTEXT
    parts = [{"type": "text", "text": part} for part in (text[:3], "", text[3:], end)]
    body: Any = {"model": MODEL, **chat(max_tokens=8, n=2)}
    plain = await sdk(http).chat.completions.create(**body)
    for content in (text + end, parts, long, "", []):
        prediction: Any = {"type": "content", "content": content}
        found = await sdk(http).chat.completions.create(**body, prediction=prediction)
        assert found.choices == plain.choices
    await posted(http, CHAT, chat(max_tokens=1, prediction=None))
    # A text that spells the end of an answer is told as text, as the model would write it.
    ids = (*ids_of(tokenizer, text), *ids_of(tokenizer, "<"), *ids_of(tokenizer, end[1:]))
    cut = tuple(ids_of(tokenizer, long[:CONTEXT]))
    assert [asked.prediction_ids for asked in submitted] == [(), ids, ids, cut, (), (), ()]


async def test_where_drafts_are_off_no_prediction_is_read(
    http: httpx2.AsyncClient, submitted: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_drafting(monkeypatch, Drafting.OFF)
    monkeypatch.setattr(Encoder, "first_ids", None)
    prediction = {"type": "content", "content": "Once upon a time"}
    await posted(http, CHAT, chat(prediction=prediction))
    assert [asked.prediction_ids for asked in submitted] == [()]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("zebra", "prediction"),
        ({"type": "zebra", "content": "zebra"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": [{"type": "zebra"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
    ],
)
async def test_a_prediction_that_is_no_text_is_refused_with_its_place(
    http: httpx2.AsyncClient, submitted: list[Request], prediction: Any, param: str
) -> None:
    error = (await posted(http, CHAT, chat(prediction=prediction), status=400))["error"]
    assert f"{param}: " in error["message"]
    assert param.startswith(error["param"])
    assert "zebra" not in error["message"]
    assert not submitted


@pytest.mark.parametrize(
    ("reports", "counts"),
    [
        ([DraftReport(5, 2)], (5, 2)),
        ([DraftReport(5, 2), None, DraftReport(0, 4)], (5, 6)),
        ([None, None], (None, None)),
    ],
)
async def test_drafts_of_all_answers_are_in_the_usage(
    tokenizer: Tokenizer,
    reports: list[DraftReport | None],
    counts: tuple[int | None, int | None],
) -> None:
    first = [token(5, choice=choice) for choice in range(len(reports))]
    ends = [token(6, FinishReason.STOP, choice=choice) for choice in range(len(reports))]
    last = [end._replace(drafts=report) for end, report in zip(ends, reports, strict=True)]
    engine = cast(EngineClient, PreparedClient([first, last]))
    body: Any = {"model": MODEL, "n": len(reports), **chat()}
    async with serving(engine, tokenizer) as (_, http):
        client = sdk(http)
        whole = await client.chat.completions.create(**body)
        completion = await client.completions.create(model=MODEL, n=len(reports), prompt="Once")
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        *_, chunk = [chunk async for chunk in await client.chat.completions.create(**body)]
    for usage in (whole.usage, completion.usage, chunk.usage):
        assert usage is not None
        assert usage.completion_tokens == 2 * len(reports), "rejected drafts are no tokens of it"
        details = usage.completion_tokens_details
        assert details is not None
        found = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        assert found == counts
        assert ("rejected_prediction_tokens" in details.to_dict()) == (counts[1] is not None)


async def test_a_response_has_the_details_that_its_api_has(tokenizer: Tokenizer) -> None:
    end = token(6, FinishReason.STOP)._replace(drafts=DraftReport(5, 2))
    engine = cast(EngineClient, PreparedClient([[end]]))
    async with serving(engine, tokenizer) as (_, http):
        found = await sdk(http).responses.create(model=MODEL, input="Hello")
    assert found.usage is not None
    assert found.usage.output_tokens_details.to_dict() == {"reasoning_tokens": 0}
