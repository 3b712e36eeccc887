"""What of the next step the device has when a step has ended, and what the host does until it has
all of it: pinned, and timed on this machine's clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest

from engine.build import build_engine, plan_engine
from engine.machine import MachineMemory
from engine.models.checkpoint import read_checkpoint
from engine.step.runner import ModelRunner
from engine.types import SamplingParams
from kvcache.backends.choice import KVBackend, KVBackendChoice
from tests.engines import Answers, request_of, run_dry
from tests.metal.graph import _standin
from tests.metal.graph.check_engine import CONFIGURED, ROOMY, SPEC
from tests.models import write_model

TOKENS = 60
# Of one sequence: four of products, project_append and decode_attention in each layer, the head,
# and the step's end. MLX's own are not counted.
COMMANDS = 6 * SPEC.num_hidden_layers + 2
SETTLED = 5  # steps behind the prompt's


class Moment(NamedTuple):
    """The host has handed a graph over, or has seen the end of a step."""

    commands: int
    """Encoded so far, by the recorder's count."""
    at_s: float


@dataclass
class Watch:
    """What an engine hands over and waits for."""

    handed: list[Moment] = field(default_factory=list)
    ended: list[Moment] = field(default_factory=list)

    def over(self, call: Callable[..., None], seen: list[Moment]) -> Callable[..., None]:
        def watched(*arrays: mx.array) -> None:
            call(*arrays)
            seen.append(Moment(_standin.counts()["commands"], time.perf_counter()))

        return watched


@pytest.mark.parametrize(("whole", "ahead", "graphs"), [(False, 2, 2), (True, COMMANDS, 1)])
def test_of_the_next_step_the_device_has(
    whole: bool,
    ahead: int,
    graphs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: list[str],
) -> None:
    """ahead: commands. graphs: that are handed over for a step."""
    monkeypatch.setattr("engine.build.compute_device", lambda _: mx.Device(mx.cpu))
    config = replace(CONFIGURED, kv_backend="paged", kv_budget_bytes=ROOMY, overlap=True)
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, seed=5))
    choice = KVBackendChoice(KVBackend.PAGED, (), maps_while_running=True)
    plan = plan_engine(config, checkpoint, MachineMemory(8 << 30, 4 << 30, 1 << 30), choice)
    loop, watch = build_engine(plan, config, lambda *_: None, Answers.empty()), Watch()
    assert isinstance(loop._runner, ModelRunner)
    loop._runner._takes_whole_steps = whole
    monkeypatch.setattr(mx, "async_eval", watch.over(mx.async_eval, watch.handed))
    monkeypatch.setattr(mx, "eval", watch.over(mx.eval, watch.ended))
    loop.mailbox.put(request_of(1, (1, 2, 3), SamplingParams(TOKENS, temperature=0.0)))
    run_dry(loop)
    monkeypatch.undo()
    loop.close()
    assert len(watch.ended) == TOKENS
    total, waits = watch.handed[-1].commands, []
    for left, end in enumerate(reversed(watch.ended[SETTLED:-1]), 1):
        begun = total - left * COMMANDS  # commands of all steps up to the one that has ended
        assert end.commands - begun == ahead
        complete = next(its for its in watch.handed if its.commands >= begun + COMMANDS)
        waits.append(max(0.0, complete.at_s - end.at_s))
    assert any(waits) != whole
    # Nothing is in flight before the first step.
    assert len(watch.handed) == graphs * TOKENS - (graphs - 1)
    report.append(
        f"when a step has ended, the device has {ahead} of the next one's {COMMANDS} commands, "
        f"handed over as {graphs}; the host works for {1e3 * statistics.median(waits):.2f} ms "
        "until it has all"
    )
