import pytest

from kvcache.canary import __main__ as pace
from kvcache.canary.__main__ import pace_actions
from kvcache.canary.trial import attempt


def test_a_pause_and_a_submission_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SIZE", 64)
    monkeypatch.setattr(pace, "PAUSE_S", 0.01)
    pause, submit = attempt(pace_actions(), lambda _: None)
    assert pause.passed
    assert submit.passed
    assert pause.figures["after_pause_s"] > 0
    assert pause.figures["pause_s"] == 0.01
    assert 0 < submit.figures["submit_s"] <= submit.figures["done_s"]
