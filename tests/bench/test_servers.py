from pathlib import Path

from tests.bench.compare import Case, Measured
from tests.bench.models import weight_bytes
from tests.bench.servers import _shares_text, streaming_row


def test_a_token_reads_all_weights_once(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "b.safetensors").write_bytes(bytes(1_000_000))
    assert weight_bytes(tmp_path) == 4_000_000
    rates, read = [1000.0, 2000.0, 3000.0], [10.0, 10.0, 10.0]
    row = streaming_row("decode", rates, read, weight_bytes(tmp_path), 0.85)
    assert (row.quire, row.peer, row.ratio.value) == (8.0, 10.0, 0.8)
    assert row.goal is not None
    assert (row.goal.text, row.goal.met) == ("ratio >= 0.85", False)
    case = Case(1, 252, 64, 1)
    seen = {
        (label, case): Measured([1.0], [1.0], [rate]) for label, rate in (("a", 1e3), ("b", 2e3))
    }
    said = _shares_text(seen, ["a", "b"], case, [10.0], tmp_path)
    assert said.endswith("a 40 % (1000.0 tok/s), b 80 % (2000.0 tok/s)")
