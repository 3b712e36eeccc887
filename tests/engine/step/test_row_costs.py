"""What steps and draft passes cost, and what of it the next process knows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import metal_ext
from engine.step import row_costs
from engine.step.row_costs import CostsFile, RowCosts
from kvcache.selftest.machine import this_machine
from kvcache.user_folders import cache_folder


def remembered(device: str = "avx2, 2 threads") -> RowCosts:
    """The costs of the next process."""
    return RowCosts(CostsFile(b"model", device))


def file() -> Path:
    (path,) = cache_folder().glob("costs-*")
    return path


def learnt() -> RowCosts:
    costs = remembered()
    for rows, seconds in ((1, 1.0), (2, 1.25), (4, 3.0)):
        costs.observe(rows, seconds)
    costs.observe_pass(1, 0.5)
    costs.save()
    return costs


def test_what_is_not_measured_is_estimated_from_the_nearest() -> None:
    costs = RowCosts()
    assert costs.ratio(1, 3) == pytest.approx(1.3)
    costs.observe(4, 2.6)
    assert costs.ratio(1, 3) == pytest.approx(1.3)
    costs.observe(1, 1.0)
    assert costs.ratio(1, 3) == pytest.approx(2.6)
    for _ in range(100):
        costs.observe(4, 1.5)
    assert costs.ratio(1, 3) == pytest.approx(1.5)


def test_a_draft_pass_is_compared_with_a_step_of_as_many_rows() -> None:
    costs = RowCosts()
    assert costs.pass_ratio(1) == costs.pass_ratio(2) == pytest.approx(0.1)
    costs.observe_pass(1, 0.2)
    assert costs.pass_ratio(1) == pytest.approx(0.1), "the time of no step is known"
    costs.observe(1, 2.0)
    costs.observe(3, 4.0)
    costs.observe_pass(1, 0.5)
    assert costs.pass_ratio(1) == pytest.approx(0.25)
    assert costs.pass_ratio(3) == pytest.approx(0.25), "as much more as a step"
    costs.observe_pass(3, 0.5)
    assert costs.pass_ratio(3) == pytest.approx(0.125)


def test_the_next_process_begins_with_what_was_learnt() -> None:
    costs, after = learnt(), remembered()
    for rows in range(1, 9):
        assert after.ratio(1, rows) == pytest.approx(costs.ratio(1, rows))
        assert after.pass_ratio(rows) == pytest.approx(costs.pass_ratio(rows))
        assert after.knows(rows) == costs.knows(rows) == (rows in (1, 2, 4))
    assert remembered("avx2, 1 threads").ratio(1, 3) == pytest.approx(1.3)


@pytest.mark.parametrize(
    "changed", ["model", "processor", "system", "mlx", "wheel_tag", "kernels", "version"]
)
def test_what_another_machine_or_program_has_learnt_does_not_count(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CostsFile(b"model", "Metal").write({1: 1.0}, {}, "fault")
    assert CostsFile(b"model", "Metal").read() == ({1: 1.0}, {}, "fault")
    if changed == "kernels":
        monkeypatch.setattr(metal_ext._ext, "__file__", __file__)
    elif changed in ("wheel_tag", "version"):
        monkeypatch.setattr(row_costs, changed, lambda *_: "another")
    else:
        other = replace(this_machine(), **{changed: "another"})
        monkeypatch.setattr(row_costs, "this_machine", lambda: other)
    assert CostsFile(b"model", "Metal").read() == ({}, {}, "")


def test_a_machine_that_is_slower_now_keeps_the_ratios() -> None:
    learnt()
    after = remembered()
    after.observe(1, 10.0)
    assert after.ratio(1, 3) == pytest.approx(3.0)
    assert after.pass_ratio(1) == pytest.approx(0.5)
    after.save()
    assert json.loads(file().read_text())["steps"]["4"] == pytest.approx(30.0)
    assert remembered().ratio(1, 3) == pytest.approx(3.0)


def test_a_file_is_written_only_if_there_is_news() -> None:
    costs = remembered()
    costs.save()
    assert not list(cache_folder().glob("*")), "nothing is learnt"
    costs.observe(1, 1.0)
    costs.save()
    assert file().stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "IsADirectoryError"),
        ("torn", "JSONDecodeError"),
        ({"model": "another"}, "another model or machine"),
        ({"steps": {"1": -1.0}}, "no times"),
        ({"passes": {"one": 1.0}}, "invalid literal"),
        ({"steps": [1.0]}, "AttributeError"),
        ({"steps": {"1": None}}, "TypeError"),
    ],
)
def test_a_file_that_is_not_right_is_ignored_and_the_reason_is_told(
    changes: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    learnt()
    path, text = file(), file().read_text()
    if changes is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_text(text[:99] if changes == "torn" else json.dumps(json.loads(text) | changes))
    costs = remembered()
    assert costs.ratio(1, 3) == pytest.approx(1.3)
    assert reason in caplog.text
    costs.observe(1, 1.0)
    costs.save()
    assert ("not kept" in caplog.text) == (changes is None)
