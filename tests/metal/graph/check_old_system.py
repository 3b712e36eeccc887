"""macOS 14, which has no residency sets: every encoder is told what its commands may reach."""

import os
import subprocess
import sys
import textwrap

RESIDENCY_SETS = "MTLDevice newResidencySetWithDescriptor:error:"


def output_of(program: str) -> str:
    """What a program says on such a system."""
    run = subprocess.run(
        [sys.executable, "-P", "-S", "-c", textwrap.dedent(program)],
        env=os.environ | {"QUIRE_STANDIN_LACKS": RESIDENCY_SETS},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_paged_and_dense_steps_run_wherever_mlx_ends_its_encoders() -> None:
    assert (
        output_of("""
            from tests.metal.graph import _standin
            from tests.metal.graph.planted import SEEDS, Program, programs
            for seed in SEEDS:
                for kind, *others in programs():
                    if kind != "sparse":
                        _standin.seed(seed)
                        assert Program(kind, *others).run() == []
            print(_standin.calls("append").count("useResources") <= 1)
        """)
        == "True"
    )


def test_an_encoder_that_is_told_nothing_is_found() -> None:
    assert "reaches a buffer that is not resident" in output_of("""
        from tests.metal.graph.planted import Plant, Program, planted
        with planted(Plant("*", "useResources", frozenset({0}), "drop")):
            print(Program("paged", "append", "gather").run())
    """)


def test_sparse_memory_is_refused_by_name() -> None:
    said = output_of("""
        from tests.metal.graph.stage import Stage
        try:
            Stage("sparse")
        except RuntimeError as error:
            print(error)
    """)
    assert "cannot run the sparse backend: the device does not answer newResidencySet" in said
