from itertools import count
from pathlib import Path

from tests.bench.contest import Contest
from tests.bench.rounds import Rounds
from tests.bench.scaling import CACHED_BLOCKS, PROMPT_TOKENS, STREAMS, Axes, run_scaling
from tests.bench.small_server import small_server


def test_it_goes_as_far_as_is_promised() -> None:
    assert (STREAMS[0], STREAMS[-1]) == (1, 64)
    assert (PROMPT_TOKENS[0], PROMPT_TOKENS[-1]) == (32, 16 * 1024)
    assert (CACHED_BLOCKS[0], CACHED_BLOCKS[-1]) == (10, 100_000)


def test_every_point_has_a_row_and_a_place_in_a_picture(tmp_path: Path) -> None:
    axes = Axes((1, 3), (32, 64), (1, 2), cached_sequences=2)
    with small_server() as own, small_server() as other:
        contest = Contest(1, count(), own.url, (("other", other.url),), with_mlx_lm=False)
        part = run_scaling(Rounds(2, 60), 1, tmp_path, contest, axes)
    assert [row.name for row in part.rows] == [
        "scaling, 1 stream",
        "scaling, 3 streams",
        "time to first token, prompt of 32",
        "time to first token, prompt of 64",
        "scaling, 2 sequences beside 1 cached blocks",
        "scaling, 2 sequences beside 2 cached blocks",
    ]
    assert [curve.x for curve in part.curves] == [[1, 3], [1, 3], [32, 64], [1, 2]]
    *servers, cached = part.curves
    assert all(list(curve.lines) == ["quire", "other"] for curve in servers)
    assert list(cached.lines) == ["scheduler and cache", "model"]
    by_name = {row.name: row for row in part.rows}
    for curve, name in zip(
        part.curves[::2], ("scaling, 3 streams", part.rows[3].name), strict=True
    ):
        for label, median in (("quire", by_name[name].quire), ("other", by_name[name].peer)):
            assert curve.lines[label][-1].median == median
    assert all(row.quire > 0 for row in part.rows)
