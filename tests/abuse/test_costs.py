"""What of costs is found; and a row, measured on a real server."""

import sys
from dataclasses import replace

import pytest

from tests.abuse.costs import Cost, main, problems
from tests.abuse.limit_rows import COMPLETIONS
from tests.fuzz.judgement import MIB

HALF = Cost(5, 5000, 200, b"a", 1.0, 1.0, 40 * MIB, 0.0)
WHOLE = replace(HALF, cpu_s=2.9, peak_bytes=119 * MIB)
BEYOND = Cost(11, 10_001, 400, b"b", 0.01, 0.01, 0, 0.0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"cpu_s": 3.1}, ["TIME GROWS"]),
        ({"peak_bytes": 121 * MIB, "body_bytes": 2 * MIB}, ["MEMORY GROWS"]),
        ({"body_bytes": MIB}, ["MUCH MEMORY"]),
        ({"status": 500}, ["SERVER ERROR"]),
        ({"status": 400, "said": b"b"}, ["NOT REFUSED"]),
        ({"status": None}, ["NO ANSWER"]),
    ],
)
def test_what_grows_too_fast_or_takes_too_much_is_found(
    changes: dict[str, object], found: list[str]
) -> None:
    whole = replace(WHOLE, body_bytes=2 * MIB)
    assert problems([HALF, replace(whole, **changes), BEYOND], 400) == [  # type: ignore[arg-type]
        *found
    ]


def test_a_row_is_measured_on_a_real_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["costs", "--only", f"max_prompts {COMPLETIONS}"])
    assert main() == 0
    said = capsys.readouterr().out
    assert f"max_prompts {COMPLETIONS} " in said
    assert "200 200 400" in said
    assert "1 rows, 0 with findings" in said
