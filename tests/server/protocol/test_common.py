import json
from random import Random
from typing import Any

import pytest
from structlog.contextvars import clear_contextvars

from engine.types import NO_SALT, EngineLimits
from server.protocol import common as module
from server.protocol.common import (
    BodyLimits,
    OpenAISamplingFields,
    bind_request_id,
    current_request_id,
)
from server.protocol.wire_errors import ApiError
from server.text.tokenizer import EncodedText

MIB = 1024**2


def test_the_seeds_of_answers_follow_each_other_and_wrap_around() -> None:
    wire = OpenAISamplingFields.model_validate({"seed": -2, "n": 3})
    request = wire.request(EncodedText("a", (1,)), NO_SALT, EngineLimits(9, 1, 9), {}, frozenset())
    assert [params.seed for params in request.params] == [2**64 - 2, 2**64 - 1, 0]


async def refusal(body: bytes, values: int, containers: int = MIB) -> ApiError | None:
    try:
        await BodyLimits(8 * MIB, values, containers).check(body)
    except ApiError as error:
        return error
    return None


def counted(value: Any) -> tuple[int, int, int]:
    """Values, containers and names, by looking at each. Nothing in a list counts as one value."""
    if not isinstance(value, dict | list):
        return 1, 0, 0
    parts = [counted(part) for part in (value.values() if isinstance(value, dict) else value)]
    values, containers, names = (sum(part[which] for part in parts) for which in range(3))
    return 1 + max(1, values), 1 + containers, names + len(value) * isinstance(value, dict)


def anything(rng: Random, depth: int = 5) -> Any:
    """A value with texts that look like JSON."""
    texts = ["", ",", '[{"', '\\"', "\\", '\\\\",[', "é\ud800"]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice([7, None, rng.choice(texts), rng.choice(texts) * 9])
    if rng.random() < 0.5:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(6))]
    return {rng.choice(texts) + str(n): anything(rng, depth - 1) for n in range(rng.randrange(6))}


@pytest.mark.parametrize("seed", range(40))
async def test_values_are_counted_outside_of_texts_wherever_the_body_is_cut(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1 + seed % 7)
    rng = Random(seed)
    value = [anything(rng) for _ in range(8)]
    body = json.dumps(value).encode() + b" " * 4000
    values, *most = counted(value)
    assert await refusal(body, values, max(most)) is None
    assert await refusal(body, values - 1) is not None
    assert await refusal(body, MIB, max(most) - 1) is not None


async def test_what_is_small_is_not_looked_at() -> None:
    assert await refusal(b"[" * 200, values=100, containers=100) is None
    assert await refusal(b"[" * 201, values=100, containers=100) is not None


async def test_a_body_says_which_limit_it_is_beyond() -> None:
    bodies = {
        "more than 10 values": b"[" + b"0," * 100 + b"0]",
        "more than 50 lists and objects": b"[" + b"[]," * 100 + b"0]",
        "objects, or names in them": b"{" + b'"k": 0,' * 50 + b'"k": 0}',
    }
    for says, body in bodies.items():
        error = await refusal(body, 10 if "10" in says else MIB, 50)
        assert error is not None
        assert (error.status, error.code) == (400, "too_many_values")
        assert says in error.message
    with pytest.raises(ApiError) as caught:
        await BodyLimits(10, 10, 10).check(b"0" * 11)
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize(
    "given",
    [b"", b"x" * 65, b"a b", b"a\n", b"a\r\nx: y", b"a/b", b"\xff", "é".encode(), b"a,b", b"a=b"],
)
async def test_threat_22_any_other_id_of_the_client_is_not(given: bytes) -> None:
    assert bind_request_id([(b"x-request-id", given)]).startswith("req_")


async def test_threat_22_two_ids_are_none() -> None:
    twice = [(b"x-request-id", b"a"), (b"x-request-id", b"a")]
    assert bind_request_id(twice).startswith("req_")


async def test_where_there_is_no_request_there_is_a_new_id_every_time() -> None:
    clear_contextvars()
    assert current_request_id() != current_request_id()
