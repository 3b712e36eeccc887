"""What a runner's GPU is asked (../hosted), asked of the stand-ins: the questions are right."""

import subprocess
from pathlib import Path

import pytest

from tests.metal.graph import _standin
from tests.metal.graph import stage as stage  # starts the stand-ins
from tests.metal.hosted.check_kernels import DTYPES, HEAD_DIMS, Case, check


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("activations", DTYPES)
def test_kernels_that_are_right_stay_far_within_the_tolerance(
    activations: str, head_dim: int
) -> None:
    for kept in DTYPES:
        assert check(Case(activations, kept, head_dim), head_dim) < 0.3


def test_every_kernel_becomes_a_pipeline_for_as_many_threads_as_the_host_dispatches() -> None:
    pipelines = Path(_standin.__file__).parents[1] / "cmake/pipelines"
    ended = subprocess.run([pipelines], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "\n225 pipelines are as they should be" in ended.stdout
