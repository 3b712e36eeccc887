from itertools import count
from pathlib import Path

import pytest

from tests.bench import twenty_turns
from tests.bench.contest import Contest
from tests.bench.models import ModelStore
from tests.bench.rounds import Rounds
from tests.bench.twenty_turns import Turn, beyond_new, run_twenty_turns
from tests.engine.models.hybrids import SPEC
from tests.hybrids import FIELDS
from tests.published import Published


def test_new_tokens_are_those_behind_the_last_answer() -> None:
    first, again = Turn(100, 0, 10, 1.0), Turn(150, 100, 10, 1.0)
    assert beyond_new([first, again]) == [10]
    assert beyond_new([first, Turn(150, 0, 10, 1.0)]) == [110]


def test_a_small_hybrid_computes_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twenty_turns, "TURNS", 4)
    contest = Contest(1, count(1), with_mlx_lm=False)
    found = run_twenty_turns(Rounds(1, 60), contest, ModelStore(tmp_path, Published(SPEC, FIELDS)))
    facts = dict(found.facts)
    assert found.rows == []
    assert facts["K, V and states"] == "0 bytes copied by quire"
    *_, most = facts["quire"].split()
    assert int(most) <= 64
