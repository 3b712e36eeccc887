"""The answers to what only a Mac can say: all of them, by names that stay."""

import json
import re
from dataclasses import replace
from pathlib import Path

from engine.doctor.answers import answers
from engine.doctor.report import Extension
from kvcache.canary.report import Step, TrialReport
from tests.engine.doctor.reports import FAILED, MAC, SAID, with_sparse

NAMES = (
    "open_files", "default_device", "kernels", "mapping_while_commands_run", "time_after_a_pause",
    "memory_pressure", "memory", "commands_ahead", "mlx_metal_wheel", "buffers_of_real_size",
)  # fmt: skip


def trial(name: str, **figures: float) -> TrialReport:
    return TrialReport((Step(name, True, "", 0.5, dict(figures)),), "", 1.0)


def test_every_answer_has_its_name_whether_it_was_asked_or_not() -> None:
    for report in (MAC, replace(MAC, device=None, extension=Extension("0.32.4", "broken", {}))):
        said = json.loads(json.dumps(answers(report)))
        assert tuple(said) == NAMES
        assert said["time_after_a_pause"] is None
        assert said["mapping_while_commands_run"]["sparse"] is None
    assert said["open_files"] is None


def test_the_document_on_metal_says_what_each_answer_is_about() -> None:
    text = (Path(__file__).parents[3] / "metal_ext" / "README.md").read_text()
    assert tuple(re.findall(r"^\| F\d+ \| `(\w+)` \|", text, re.MULTILINE)) == NAMES


def test_answers_are_what_was_seen() -> None:
    files = {"soft": 256, "hard": None, "raised": 10240}
    report = replace(
        with_sparse(
            stress=trial("end", rounds=50, overlapped=49), canary=trial("real buffers", buffers=64)
        ),
        extension=Extension("0.32.4", "", SAID | {"open_files": files, "default_device": "gpu"}),
        pace=trial("pause", warm_s=0.1, after_pause_s=0.3),
        pressure="warning",
        wheel="macosx_15_0",
        wheel_warning="it is old",
    )
    said = answers(report)
    assert said["open_files"] == files
    assert said["default_device"]["device"] == "gpu"
    assert said["kernels"]["sparse"] == {"passed": True, "fault": ""}
    assert said["mapping_while_commands_run"]["sparse"] == {
        "passed": True, "fault": "", "rounds": 50, "overlapped": 49, "seconds": 0.5,
    }  # fmt: skip
    assert said["time_after_a_pause"] == {"warm_s": 0.1, "after_pause_s": 0.3, "seconds": 0.5}
    assert said["commands_ahead"] is None
    assert (said["memory_pressure"], said["memory"]["working_set_bytes"]) == ("warning", 12 << 30)
    assert said["mlx_metal_wheel"]["tag"] == "macosx_15_0"
    assert said["mlx_metal_wheel"]["warning"] == "it is old"
    assert said["buffers_of_real_size"]["sparse"]["buffers"] == 64
    assert said["buffers_of_real_size"]["paged"] == {"passed": False, "fault": FAILED.fault}
