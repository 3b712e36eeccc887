import math
from dataclasses import replace
from itertools import count

import pytest

from tests.bench.compare import (
    Case,
    Measured,
    Seen,
    check_whole,
    compare_round,
    facts,
    nothing_seen,
    rate_rows,
    run_case,
    streams_text,
    ttft_rows,
)
from tests.bench.load import Answer, LoadResult
from tests.bench.models import TEMPLATE_TOKENS
from tests.bench.peers import BrokenError, Remote
from tests.bench.small_server import small_server

CASE = Case(streams=2, prompt_tokens=86, max_tokens=6, requests_per_stream=1)
WHOLE = Answer(1.0, 3.0, (2.0, 2.5), 86, 6, "length", None)


def ours(url: str = "http://127.0.0.1:1", *, has_our_model: bool = True) -> Remote:
    with small_server() as server:
        remote = Remote.at("ours", server.url if url.endswith(":1") else url)
    return replace(remote, has_our_model=has_our_model)


# --- what may be compared ----------------------------------------------------------------------


def test_whole_answers_may_be_compared() -> None:
    check_whole(ours(), LoadResult([WHOLE, WHOLE], 0.1), CASE)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([WHOLE, replace(WHOLE, error="no answer")], "ours: 1 requests failed: no answer"),
        ([WHOLE], r"ours: 1 of 2 answers have a text"),
        ([WHOLE, replace(WHOLE, text_times_s=())], r"ours: 1 of 2 answers have a text"),
        ([WHOLE, replace(WHOLE, completion_tokens=5)], r"\(86, 5\), \(86, 6\)"),
        ([WHOLE, replace(WHOLE, prompt_tokens=85)], r"\(85, 6\), \(86, 6\)"),
    ],
    ids=["an error", "one too few", "no text", "a short answer", "another prompt"],
)
def test_servers_that_do_different_work_are_not_compared(answers: list[Answer], says: str) -> None:
    with pytest.raises(BrokenError, match=says):
        check_whole(ours(), LoadResult(answers, 0.1), CASE)


def test_a_model_that_is_not_ours_may_count_as_it_likes() -> None:
    other = replace(WHOLE, prompt_tokens=41, completion_tokens=3)
    check_whole(ours(has_our_model=False), LoadResult([WHOLE, other], 0.1), CASE)


# --- rounds ------------------------------------------------------------------------------------


def test_sides_take_turns_after_warm_ups_and_no_prompt_comes_twice() -> None:
    seen = nothing_seen()
    order: list[str] = []
    with small_server() as one, small_server() as other:
        contestants = [Remote.at("one", one.url), Remote.at("other", other.url)]
        seeds = count(1)
        for number in (0, 1):
            compare_round(seen, contestants, [CASE], number, seeds)
            order.append(f"{len(one.bodies)} {len(other.bodies)}")
    assert order == ["4 4", "8 8"], "as many requests warm up as count"
    for server in (one, other):
        assert [body["max_tokens"] for body in server.bodies] == [8, 8, 6, 6] * 2
        lengths = [len(prompt) + TEMPLATE_TOKENS for prompt in server.prompts]
        assert lengths == [64, 64, 86, 86] * 2
    assert len({*one.prompts, *other.prompts}) == 16
    assert {figures.lengths.pop() for figures in seen.values()} == {(86, 6)}
    assert [len(figures.ttft_ms) for figures in seen.values()] == [2, 2]


def test_whoever_goes_first_in_one_round_goes_last_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def note(contestant: Remote, case: Case, seed: int) -> LoadResult:
        asked.append(contestant.label)
        return LoadResult([WHOLE, WHOLE], 0.1)

    monkeypatch.setattr("tests.bench.compare.run_case", note)
    sides = [replace(ours(), label=label) for label in ("a", "b")]
    for number in (0, 1):
        compare_round(nothing_seen(), sides, [CASE], number, count())
    assert asked == ["a", "a", "b", "b", "b", "b", "a", "a"]


def test_a_server_that_has_gone_gives_no_figures() -> None:
    gone = ours()
    with pytest.raises(BrokenError, match="ours: "):
        run_case(gone, CASE, 1)


def test_a_warm_up_is_as_wide_as_its_load_and_shorter() -> None:
    long = Case(8, 16384, 64, 4, 300.0)
    assert long.warm_up() == Case(8, 64, 8, 1, 300.0)
    assert Case(1, 40, 6, 1).warm_up().prompt_tokens == 40
    assert long.requests == 32


# --- rows --------------------------------------------------------------------------------------


def figures(rate: float, ttft_ms: float, lengths: tuple[int, int] = (86, 6)) -> Measured:
    return Measured([rate], [ttft_ms], [rate], [0.1], {lengths})


def test_rows_are_of_the_first_beside_each_other() -> None:
    seen: Seen = {
        ("quire", CASE): figures(30, 10),
        ("a", CASE): figures(10, 20),
        ("b", CASE): figures(60, 5),
    }
    labels = ["quire", "a", "b"]
    rates = rate_rows("load", seen, labels, [CASE], lambda peer, _: {"a": 2.0}.get(peer))
    assert [(row.name, row.peer_name, row.ratio.value) for row in rates] == [
        ("load, 2 streams", "a", 3.0),
        ("load, 2 streams", "b", 0.5),
    ]
    assert [row.goal.met if row.goal else None for row in rates] == [True, None]
    times = ttft_rows(seen, labels, [CASE], lambda *_: 1.0, lambda case: f"{case.streams}")
    assert [row.ratio.value for row in times] == [2.0, 0.5]
    assert {row.name for row in times} == {"time to first token, 2"}


def test_chunks_are_not_taken_for_tokens_of_who_reports_no_usage() -> None:
    seen = nothing_seen()
    with small_server() as own, small_server(reports_usage=False) as other:
        sides = [Remote.at("quire", own.url), Remote.at("other", other.url)]
        compare_round(seen, sides, [CASE], 0, count())
    assert math.isnan(seen["other", CASE].tokens_per_s[0])
    (row,) = rate_rows("load", seen, ["quire", "other"], [CASE], lambda *_: 1.0)
    assert row.peer_name == "other, reports no usage"
    assert row.quire > 0
    assert row.goal is None
    assert row.cells()[3:] == ("-  other, reports no usage", "-", "-", "")
    (ttft,) = ttft_rows(seen, ["quire", "other"], [CASE], lambda *_: None, lambda _: "load")
    assert ttft.peer > 0, "the first text needs no count"


def test_facts_say_who_counts_otherwise() -> None:
    seen: Seen = {("quire", CASE): figures(1, 1), ("a", CASE): figures(1, 1, (40, 6))}
    (name, said), client = facts("load", seen, [CASE])
    assert name == "load"
    assert said.startswith("1 rounds of 1 requests per stream: prompts of 86 tokens, answers of 6")
    assert said.endswith("counted otherwise by a [(40, 6)]")
    assert client == ("load: load client", "at most 10 % of one core")


def test_streams_are_counted_in_words() -> None:
    assert [streams_text(1), streams_text(8)] == ["1 stream", "8 streams"]
