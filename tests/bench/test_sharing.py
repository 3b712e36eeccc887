from dataclasses import replace

from tests.bench.sharing import Shared

ONCE = Shared(copied_bytes=0, one_bytes=2**25, all_bytes=2**26, crowd_tokens=1024 + 50 * 32)


def test_what_is_shared_stands_beside_what_would_be_apart() -> None:
    together, crowd = ONCE.rows()
    assert (together.quire, together.peer, together.ratio.value) == (64.0, 1024.0, 16.0)
    assert (crowd.quire, crowd.peer) == (2624.0, 52800.0)


def test_a_crowd_should_compute_its_prefix_once() -> None:
    for shared, met in ((ONCE, True), (replace(ONCE, crowd_tokens=2625), False)):
        goal = shared.rows()[1].goal
        assert goal is not None
        assert goal.met is met
