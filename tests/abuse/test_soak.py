"""The fixed, short part of the soak."""

from tests.abuse.soak import DEMO, soak


def test_rude_clients_leave_nothing_behind() -> None:
    run = soak(DEMO, minutes=0.0, seed=1)
    assert run.problems == [], run.report()
    assert any(what.startswith("honest: 200") for what in run.outcomes), run.report()
    assert len(run.outcomes) > 4, run.report()
