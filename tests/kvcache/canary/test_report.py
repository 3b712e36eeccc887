import json

import pytest

from kvcache.canary.report import Step, TrialReport, fault_of, from_line, to_line

GOOD = Step("map", True, "8 blocks", 0.5, {"bytes": 7})
BAD = Step("read", False, "3 rows are wrong", 0.1)


def test_steps_cross_from_one_process_to_another_as_one_line() -> None:
    line = to_line([GOOD, BAD])
    assert "\n" not in line
    assert from_line(line) == (GOOD, BAD)


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "7", "null", '{"steps": 3}', '{"steps": [{}]}', '{"steps": [{"nam": 1}]}'],
)
def test_anything_else_is_no_report(line: str) -> None:
    with pytest.raises(ValueError, match="not a report"):
        from_line(line)


def test_a_report_of_nothing_is_none() -> None:
    with pytest.raises(ValueError, match="of nothing"):
        from_line(to_line([]))


def test_the_fault_is_that_of_the_first_step_that_failed() -> None:
    assert fault_of([GOOD]) == ""
    assert fault_of([GOOD, BAD, GOOD]) == "read: 3 rows are wrong"


def test_a_report_is_json_with_its_verdict() -> None:
    report = TrialReport((GOOD, BAD), fault_of([BAD]), 1.5)
    said = json.loads(json.dumps(report.as_json()))
    assert not report.passed
    assert (said["passed"], said["seconds"]) == (False, 1.5)
    assert said["steps"][0]["figures"] == {"bytes": 7}
    assert TrialReport((GOOD,), "", 1.0).passed
