"""The traces find what must not be; a short one passes."""

import pytest

from tests.clients.traces.replay import Turn


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        (Turn(900, 100, 116), None),
        (Turn(900, 100, 117), "117 tokens were computed for 100 new ones"),
        (Turn(900, 100, 99), "1 tokens came from a cache that never had them"),
        (Turn(900, 100, 100, "a call", named=True), None),
        (
            Turn(900, 100, 100, "a call", named=False),
            "a call changed, and the answer did not say where",
        ),
    ],
)
def test_a_turn_that_breaks_its_promise_is_found(turn: Turn, problem: str | None) -> None:
    assert turn.problem == problem
