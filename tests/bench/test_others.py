import subprocess
import sys
import time

from tests.bench.others import Busy, others_text


def test_what_a_child_does_is_not_others() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            time.sleep(0.2)
            before = Busy.now()
            deadline_s = time.monotonic() + 60
            while Busy.now().ours_s < before.ours_s + 0.5:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            after = Busy.now()
        finally:
            child.kill()
    assert after.machine_s >= before.machine_s + 0.4
    assert after.others_since(before) <= (after.machine_s - before.machine_s - 0.5) / (
        after.at_s - before.at_s
    )


def test_others_are_what_is_left_and_never_less_than_nothing() -> None:
    before = Busy(10.0, 100.0, 50.0)
    assert Busy(14.0, 107.0, 56.0).others_since(before) == 0.25
    assert Busy(14.0, 107.0, 58.0).others_since(before) == 0.0


def test_a_machine_that_was_not_calm_is_said_to_be_none() -> None:
    assert others_text(0.04) == "at most 4 % of one core"
    assert others_text(0.3) == "at most 30 % of one core: NOT CALM, run it again"
