"""Every limit has its rows, whose bodies are as large as they say; and what of costs is found."""

import sys
from dataclasses import replace

import pytest

from server.config import LimitsSection
from server.protocol.wire_errors import ApiError
from tests.abuse.costs import Cost, main, problems
from tests.abuse.limit_rows import ALIASES, BY_PATH, COMPLETIONS, UNREACHED, Row, rows
from tests.fuzz.judgement import MIB

ROWS = rows(4096)
BODIES = [row for row in ROWS if row.limit in ("max_body_bytes", "max_tokenize_bytes")]
VALUES = [row for row in ROWS if row.limit in ("max_body_values", "max_body_token_ids")]


def test_every_limit_has_rows_or_a_reason_why_no_body_reaches_it() -> None:
    reached = {row.limit for row in ROWS}
    of_routes = {"max_depth", "engine.max_model_len"}
    assert reached - of_routes | UNREACHED.keys() == LimitsSection.model_fields.keys()
    assert not reached & UNREACHED.keys()
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_every_route_has_rows_for_all_that_bounds_its_bodies() -> None:
    for path in BY_PATH.keys() - set(ALIASES):
        limits = {row.limit for row in ROWS if row.path == path}
        assert "max_depth" in limits
        assert limits & {"max_body_values", "max_body_token_ids"}
        # Ids are fewer than that many bytes.
        assert limits & {"max_body_bytes", "max_tokenize_bytes"} or path == "/detokenize"
    assert {BY_PATH[path] for path in ALIASES} <= {BY_PATH[row.path] for row in VALUES}


@pytest.mark.parametrize("row", [*BODIES, *VALUES], ids=lambda row: row.name)
async def test_a_body_is_as_large_as_its_limit(row: Row) -> None:
    limits = BY_PATH[row.path]
    await limits.check(row.body(row.most, "b"))
    with pytest.raises(ApiError) as caught:
        await limits.check(row.body(row.most + row.grain, "b"))
    assert caught.value.status == row.refusal


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bodies_of_one_size_differ_and_grow_with_it(row: Row) -> None:
    first, other = (row.request(row.most // 2, mark) for mark in "bc")
    assert len(first) == len(other)
    alike = ("max_stop_token_ids", "max_logit_biases", "max_depth")
    assert (first == other) == (row.limit in alike or row.what == "lists")
    larger = len(row.request(row.most, "b"))
    is_a_number = row.limit in ("max_choices", "max_top_logprobs")
    assert larger > len(first) or is_a_number
    # A frame around them is as large for any size.
    assert larger < 2.2 * len(first)


HALF = Cost(5, 5000, 200, b"a", 1.0, 1.0, 40 * MIB, 0.0)
WHOLE = replace(HALF, cpu_s=2.9, peak_bytes=119 * MIB)
BEYOND = Cost(11, 10_001, 400, b"b", 0.01, 0.01, 0, 0.0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"cpu_s": 3.1}, ["TIME GROWS"]),
        ({"peak_bytes": 121 * MIB, "body_bytes": 2 * MIB}, ["MEMORY GROWS"]),
        ({"body_bytes": MIB}, ["MUCH MEMORY"]),
        ({"status": 500}, ["SERVER ERROR"]),
        ({"status": 400, "said": b"b"}, ["NOT REFUSED"]),
        ({"status": None}, ["NO ANSWER"]),
    ],
)
def test_what_grows_too_fast_or_takes_too_much_is_found(
    changes: dict[str, object], found: list[str]
) -> None:
    whole = replace(WHOLE, body_bytes=2 * MIB)
    assert problems([HALF, replace(whole, **changes), BEYOND], 400) == [  # type: ignore[arg-type]
        *found
    ]


def test_what_is_beyond_a_limit_is_refused_at_once() -> None:
    half, whole = replace(HALF, cpu_s=0.01), replace(HALF, cpu_s=0.59)
    assert problems([half, whole, BEYOND], 400) == [], "beneath the floor"
    assert problems([half, whole, replace(BEYOND, seconds=0.6)], 400) == ["REFUSED LATE"]
    assert problems([half, whole, BEYOND], 413) == ["NOT REFUSED"]
    assert problems([half], 400) == ["NO ANSWER"]


def test_a_row_is_measured_on_a_real_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["costs", "--only", f"max_prompts {COMPLETIONS}"])
    assert main() == 0
    said = capsys.readouterr().out
    assert f"max_prompts {COMPLETIONS} " in said
    assert "200 200 400" in said
    assert "1 rows, 0 with findings" in said
