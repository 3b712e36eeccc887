"""The fixed, short part of the soak."""

from dataclasses import replace

from tests.abuse.soak import DEMO, GROWTH_LIMIT_BYTES, HEAP_BYTES, Rest, cut_off_late, soak

QUIET = Rest(
    live=0,
    quarantined=0,
    committed=HEAP_BYTES,
    heaps=2,
    connections=0,
    descriptors=20,
    threads=9,
    resident=10**9,
)


def test_rude_clients_leave_nothing_behind() -> None:
    run = soak(DEMO, minutes=0.0, seed=1)
    assert run.problems == [], run.report()
    assert any(what.startswith("honest: 200") for what in run.outcomes), run.report()
    assert len(run.outcomes) > 4, run.report()


def test_who_is_cut_off_without_a_word_is_so_no_later_than_others_are_refused() -> None:
    assert cut_off_late([0.9], []) == cut_off_late([2.9], [0.1, 3.0]) == []
    (problem,) = cut_off_late([0.9, 3.1, 5.04], [0.1, 3.0])
    assert problem.startswith("2 honest clients were cut off without a word, after up to 5.0 s")


def test_whatever_is_left_is_a_problem() -> None:
    assert QUIET.problems(QUIET) == []
    left: tuple[dict[str, int], ...] = (
        {"live": 1},
        {"connections": 1},
        {"committed": HEAP_BYTES + 1},
        {"descriptors": 21},
        {"threads": 10},
        {"resident": QUIET.resident + GROWTH_LIMIT_BYTES + 1},
    )
    for changes in left:
        assert replace(QUIET, **changes).problems(QUIET), changes
