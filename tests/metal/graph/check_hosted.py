"""What a runner's GPU is asked (../hosted), asked of the stand-ins: the questions are right."""

import subprocess
from pathlib import Path

import mlx.core as mx

from tests.metal.graph import _standin
from tests.metal.graph import stage as stage  # starts the stand-ins
from tests.metal.hosted.check_kernels import last_results


def test_kernels_that_are_right_pass_the_self_test() -> None:
    mx.set_default_device(mx.Device(mx.cpu))
    results = last_results()
    assert [result for result in results if not result.passed] == []
    assert [result.name.partition(": ")[2] for result in results] == ["end"] * 9


def test_every_kernel_becomes_a_pipeline_for_as_many_threads_as_the_host_dispatches() -> None:
    pipelines = Path(_standin.__file__).parents[1] / "cmake/pipelines"
    ended = subprocess.run([pipelines], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "\n516 pipelines are as they should be" in ended.stdout
