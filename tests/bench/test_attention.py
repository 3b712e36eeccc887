import mlx.core as mx
import pytest

import metal_ext
from tests.bench import attention
from tests.bench.attention import PaddedBatch, paged_layer, run_attention
from tests.bench.peers import BrokenError
from tests.bench.rounds import Rounds

MIB = 1024**2


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code on less of everything."""
    monkeypatch.setattr(attention, "DECODE_TOKENS", (5, 130, 64))
    monkeypatch.setattr(attention, "CHUNK_TOKENS", 40)
    monkeypatch.setattr(attention, "CHUNK_END", 170)
    monkeypatch.setattr(attention, "PROBE_BYTES", 2 * MIB)


@pytest.mark.usefixtures("small")
def test_every_row_of_attention_has_figures_of_both_sides() -> None:
    part = run_attention(Rounds(2, 5), Rounds(1, 5), threads=2)
    assert len(part.rows) == 5
    for row in part.rows:
        assert row.quire > 0
        assert row.peer > 0
        assert row.ratio.low <= row.ratio.high
    decode = [row for row in part.rows if "decode" in row.name]
    assert [row.goal is not None for row in decode] == [True, True]
    assert part.facts == []


@pytest.mark.usefixtures("small")
def test_sides_that_do_not_agree_give_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PaddedBatch.attend
    for wrong in (1.5, float("nan")):
        monkeypatch.setattr(PaddedBatch, "attend", lambda self, q, w=wrong: attend(self, q) + w)
        with pytest.raises(BrokenError, match="decode attention differs from MLX's by"):
            run_attention(Rounds(1, 5), Rounds(1, 5), threads=1)


def test_useful_bytes_are_those_of_the_tokens_and_of_no_padding() -> None:
    workers = metal_ext.CpuWorkers(1)
    cache = paged_layer((5, 130), mx.bfloat16, workers)
    assert cache.useful_bytes == 135 * 2 * attention.KV_HEADS * attention.HEAD_DIM * 2


def test_a_chunks_work_is_that_below_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_TOKENS", 3)
    monkeypatch.setattr(attention, "CHUNK_END", 5)
    pairs = 3 + 4 + 5
    assert attention._chunk_flop() == 4 * pairs * attention.QUERY_HEADS * attention.HEAD_DIM
