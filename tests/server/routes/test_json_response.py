import asyncio
import json
from random import Random
from typing import Any

import pytest
from pydantic_core import to_json

from server.routes.json_response import PIECE_BYTES, json_pieces, json_response


def long_answer(rng: Random) -> Any:
    tokens = [{"token": "é\ud83d\ude00"[:1], "bytes": [1, 2], "top": [{"a": 1.5}]}] * 3000
    vectors = [[rng.random() for _ in range(5000)] for _ in range(3)]
    return {"object": "list", "": None, "choices": [{"logprobs": tokens}], "data": vectors}


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        {"a": [], "b": {}, 'c"\n': [{}, [], [[]]]},
        list(range(10_000)),
        ["é"] * 4097,
        [[]] * 17,
        [{"a": [0] * 5000}] * 20,
        long_answer(Random(1)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_pieces_are_the_same_json(value: Any) -> None:
    pieces = list(json_pieces(value))
    assert b"".join(pieces) == to_json(value)
    assert max(map(len, pieces)) < 2 * PIECE_BYTES


async def test_others_run_while_an_answer_is_written() -> None:
    beats, answer = 0, {"data": [long_answer(Random(2))] * 20}
    writing = asyncio.ensure_future(json_response(json_pieces(answer)))
    while not writing.done():
        await asyncio.sleep(0)
        beats += 1
    response = await writing
    assert json.loads(bytes(response.body))["data"][0]["object"] == "list"
    assert response.headers["content-length"] == str(len(response.body))
    assert beats > len(response.body) / PIECE_BYTES / 2
