"""A device that hangs, in a real process: streams are told, stacks are dumped, it ends with 1."""

import sys
from pathlib import Path

import httpx2

from tests.abuse.processes import END_LIMIT_S, SMALL, serving
from tests.server.harness import CHAT, chat

# The command, with a device that hangs after so many steps.
HANGING = """
import threading
import metal_ext
import engine.step.runner
from server.cli import main

steps, sample = [], engine.step.runner.sample

def hanging(*arguments):
    steps.append(1)
    if len(steps) > 20:
        threading.Event().wait()
    return sample(*arguments)

engine.step.runner.sample = hanging
main()
"""


def test_fault_10_a_process_whose_device_hangs_says_where_and_ends_with_1(tiny_model: Path) -> None:
    quire = (sys.executable, "-c", HANGING)
    with serving(tiny_model, *SMALL, "--set", "engine.watchdog_s=2", quire=quire) as server:
        body = chat("secret words", max_tokens=300, stream=True, logit_bias={"7": 100})
        with httpx2.stream("POST", server.url + CHAT, json=body, timeout=END_LIMIT_S) as response:
            text = "".join(response.iter_text())
        assert server.wait() == 1
    assert "the engine has ended" in text.split("\n\n")[-2]
    assert "[DONE]" not in text
    assert "a step of the engine has been running for" in server.text
    assert "EngineStats(running=1" in server.text
    assert "in hanging" in server.text
    assert "secret" not in server.text
