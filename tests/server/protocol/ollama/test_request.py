import math
from typing import Any

import pytest

from server.protocol.ollama.request import keep_alive_s
from server.protocol.wire_errors import ApiError


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0),
        (90, 90),
        (1.5, 1.5),
        (-1, math.inf),
        ("0", 0),
        ("-1", math.inf),
        ("300", 300),
        ("0s", 0),
        ("10m", 600),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("+2s", 2),
        (" 250ms ", 0.25),
        ("1h2m3s4ms5us6ns", 3723.004005006),
        ("7µs", 7e-6),
        ("-10m", math.inf),
    ],
)
def test_a_duration_is_seconds(value: Any, seconds: float | None) -> None:
    assert keep_alive_s(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "value", ["", "m", "10 m", "soon", "1d", "--1", "1m2", "1e5", "٣s", "9" * 5000, "1s" * 9 + "x"]
)
def test_what_is_no_duration_is_refused(value: str) -> None:
    with pytest.raises(ApiError) as caught:
        keep_alive_s(value)
    assert (caught.value.status, caught.value.param) == (400, "keep_alive")
