"""What steps and draft passes cost, and what of it the next process knows."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.step.row_costs import SAVE_INTERVAL_S, CostsFile, RowCosts
from engine.types import DraftReport, SamplingParams, TokenEvent
from kvcache.backends.choice import KVBackend
from kvcache.user_folders import cache_folder
from tests.engines import CONFIG, built_loop, request_of, run_dry


def remembered(threads: int = 2) -> RowCosts:
    """The costs of the next process."""
    return RowCosts(CostsFile(b"model", KVBackend.POSIX, "avx2", threads))


def file() -> Path:
    (path,) = cache_folder().glob("costs-*")
    return path


def rewrite(**changes: Any) -> None:
    file().write_text(json.dumps(json.loads(file().read_text()) | changes))


def learnt() -> RowCosts:
    costs = remembered()
    for rows, seconds in ((1, 1.0), (2, 1.25), (4, 3.0)):
        costs.observe(rows, seconds)
    costs.observe_pass(1, 0.5)
    costs.save()
    return costs


# --- of one process ------------------------------------------------------------------------------


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
    assert costs.pass_ratio(1) == pytest.approx(0.1)
    costs.observe_pass(1, 0.5)
    assert costs.pass_ratio(1) == pytest.approx(0.25)
    assert costs.pass_ratio(3) == pytest.approx(0.25), "as much more as a step"
    costs.observe_pass(3, 0.5)
    assert costs.pass_ratio(3) == pytest.approx(0.125)


# --- of the next process -------------------------------------------------------------------------


def test_the_next_process_begins_with_what_was_learnt() -> None:
    costs, after = learnt(), remembered()
    for rows in range(1, 9):
        assert after.ratio(1, rows) == pytest.approx(costs.ratio(1, rows))
        assert after.pass_ratio(rows) == pytest.approx(costs.pass_ratio(rows))
        assert after.knows(rows) == costs.knows(rows) == (rows in (1, 2, 4))
    assert remembered(threads=1).ratio(1, 3) == pytest.approx(1.3)


def test_a_machine_that_is_slower_now_keeps_the_ratios() -> None:
    learnt()
    after = remembered()
    after.observe(1, 10.0)
    assert after.ratio(1, 3) == pytest.approx(3.0)
    assert after.pass_ratio(1) == pytest.approx(0.5)
    after.save()
    assert json.loads(file().read_text())["steps"]["4"] == pytest.approx(30.0)
    assert remembered().ratio(1, 3) == pytest.approx(3.0)


def test_a_file_is_written_only_after_a_while_and_if_there_is_news() -> None:
    costs = remembered()
    costs.save(0.0)
    assert not list(cache_folder().glob("*")), "nothing is learnt"
    costs.observe(1, 1.0)
    costs.save(0.0)
    assert file().stat().st_mode & 0o777 == 0o600
    file().unlink()
    costs.save(SAVE_INTERVAL_S)
    costs.observe(1, 1.0)
    costs.save(SAVE_INTERVAL_S - 1)
    assert not list(cache_folder().glob("costs-*"))
    costs.save(SAVE_INTERVAL_S)
    assert file().exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "JSONDecodeError"),
        ({"model": "another"}, "another model or machine"),
        ({"mlx": "0.1"}, "another model or machine"),
        ({"steps": {"1": -1.0}}, "no times"),
        ({"steps": {"1": 1e999}}, "no times"),
        ({"passes": {"one": 1.0}}, "invalid literal"),
        ({"steps": [1.0]}, "AttributeError"),
        ({"steps": {"1": None}}, "TypeError"),
    ],
)
def test_a_file_that_is_not_right_is_ignored_and_the_reason_is_told(
    changes: dict[str, Any] | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    learnt()
    if changes is None:
        file().write_text(file().read_text()[:100])
    else:
        rewrite(**changes)
    assert remembered().ratio(1, 3) == pytest.approx(1.3)
    assert reason in caplog.text


def test_a_file_that_cannot_be_read_or_written_costs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    learnt()
    path = file()
    path.unlink()
    path.mkdir()
    costs = remembered()
    assert "learnt anew" in caplog.text
    costs.observe(1, 1.0)
    costs.save()
    assert "not kept" in caplog.text


# --- of engines ----------------------------------------------------------------------------------


def drafts_of_engine(folder: Path, prediction: tuple[int, ...]) -> tuple[list[int], DraftReport]:
    """Return the answer of a new engine, and how drafts fared."""
    events: list[TokenEvent] = []
    config = replace(CONFIG, page_bytes=None, kv_budget_bytes=None, drafts=True)
    loop = built_loop(folder, config, events.extend)
    params = SamplingParams(60, temperature=0.0)
    loop.mailbox.put(request_of(1, range(40), params, prediction_ids=prediction))
    run_dry(loop)
    loop.close()
    tokens = [event.token_id for event in events if event.token_id is not None]
    return tokens, events[-1].drafts or DraftReport(0, 0)


def test_an_engine_that_restarts_begins_with_the_costs_that_it_learnt(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plain, _ = drafts_of_engine(tiny_model, ())
    assert drafts_of_engine(tiny_model, tuple(plain))[1].accepted > 30
    steps = json.loads(file().read_text())["steps"]
    assert {"1", "8"} <= steps.keys()
    rewrite(steps={"1": 1.0, "2": 9.0, "8": 99.0})
    assert drafts_of_engine(tiny_model, tuple(plain)) == (plain, DraftReport(0, 0))
    assert not caplog.records


def test_an_idle_engine_writes_its_costs_down(tiny_model: Path) -> None:
    config = replace(CONFIG, page_bytes=None, kv_budget_bytes=None, idle_release_s=0.0)
    loop = built_loop(tiny_model, replace(config, drafts=True), lambda _: None)
    loop.mailbox.put(request_of(1, range(40), SamplingParams(20)))
    run_dry(loop)
    assert not list(cache_folder().glob("costs-*")), "a step is not delayed"
    for _ in range(3):
        loop.run_once()
    assert file().exists()
    loop.close()
