"""What a runner's GPU is asked (tests/metal/hosted/check_kernels.py), asked of the stand-ins: the
questions themselves are right, and a wrong answer would be seen."""

import subprocess
from pathlib import Path

import pytest

from tests.metal.graph import _standin
from tests.metal.graph import stage as stage  # starts the stand-ins
from tests.metal.hosted import check_kernels
from tests.metal.hosted.check_kernels import DTYPES, HEAD_DIMS, Case, Floats

SMALL = Case("bfloat16", "bfloat16", 64)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("activations", DTYPES)
def test_kernels_that_are_right_stay_far_within_the_tolerance(
    activations: str, head_dim: int
) -> None:
    for kept in DTYPES:
        assert check_kernels.check(Case(activations, kept, head_dim), head_dim) < 0.3


def test_every_kernel_becomes_a_pipeline_for_as_many_threads_as_the_host_dispatches() -> None:
    pipelines = Path(_standin.__file__).parents[1] / "cmake/pipelines"
    ended = subprocess.run([pipelines], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "\n225 pipelines are as they should be" in ended.stdout


def test_a_position_that_is_one_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = check_kernels.turned
    monkeypatch.setattr(
        check_kernels, "turned", lambda rows, weight, position: right(rows, weight, position + 1)
    )
    assert check_kernels.check(SMALL, 1) > 10


@pytest.mark.parametrize("mistake", ["the newest token", "the first token", "another head"])
def test_attention_over_the_wrong_rows_is_seen(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = check_kernels.attention

    def wrong(queries: Floats, keys: Floats, values: Floats, scale: float) -> Floats:
        if mistake == "another head":
            return right(queries, keys[:, ::-1], values, scale)
        if len(keys) == 1:
            return right(queries, keys, values, scale)
        kept = slice(1, None) if mistake == "the first token" else slice(-1)
        return right(queries, keys[kept], values[kept], scale)

    monkeypatch.setattr(check_kernels, "attention", wrong)
    assert check_kernels.check(SMALL, 2) > 10


def test_a_wrong_result_is_said_and_a_refusal_is_wrong_where_the_gpu_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(case: Case, seed: int) -> float:
        if case.head_dim == 256:
            raise RuntimeError("no such pipeline")
        return 2.0 if case.head_dim == 128 else 0.5

    monkeypatch.setattr(check_kernels, "check", refused)
    assert check_kernels.main() == 1
    said = capsys.readouterr().out
    assert "9 cases good, 0 skipped, 18 wrong" in said
    monkeypatch.setattr(check_kernels, "may_refuse_kernels", lambda: True)
    assert check_kernels.main() == 1
    assert "9 cases good, 9 skipped, 9 wrong" in capsys.readouterr().out
