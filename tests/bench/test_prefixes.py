from collections import defaultdict

import pytest

from tests.bench.prefixes import PREFIX_TOKENS, Seen, Ttfts, _ttft_rows, flatness
from tests.bench.programs import Program

OURS, PEER = (Program(label, label, (), label) for label in ("ours", "peer"))


def test_flatness_is_of_medians() -> None:
    assert flatness([[2.0, 2.0, 90.0], [3.0], [1.0, 2.5, 3.0]]) == 1.5


@pytest.mark.parametrize(("longest_ms", "met"), [(14.0, True), (16.0, False)])
def test_a_cached_prefix_of_any_length_should_cost_about_the_same(
    longest_ms: float, met: bool
) -> None:
    seen: Seen = defaultdict(lambda: Ttfts([100.0], [10.0]))
    seen["ours", PREFIX_TOKENS[-1]] = Ttfts([500.0], [longest_ms])
    *figures, flat = _ttft_rows(seen, OURS, PEER)
    assert len(figures) == 2 * len(PREFIX_TOKENS)
    assert flat.goal is not None
    assert flat.goal.met is met
    assert (flat.quire, flat.peer) == (longest_ms / 10.0, 1.0)
