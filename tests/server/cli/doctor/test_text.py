from dataclasses import replace

import pytest

from engine.doctor.report import DoctorReport, Extension
from kvcache.substrates import Substrate
from server.cli.doctor.text import report_lines
from tests.engine.doctor.reports import FAILED, MAC, PASSED, SAID, with_sparse


def text(report: DoctorReport) -> str:
    return "\n".join(report_lines(report))


def test_a_machine_is_described_in_plain_words() -> None:
    said = text(MAC)
    for words in (
        "Mac15,6, Apple M3 Pro",
        "macOS 26.4 (25E246), Python 3.12.1",
        "built for MLX 0.32.4, which is installed",
        "Apple M3 Pro: working set 12.00 GiB, largest buffer 9.00 GiB; families: apple9, metal4; "
        "unified memory: yes; residency sets: no; sort: 3",
        "12.00 GiB, of which 10.00 GiB are available and 3.00 GiB are left to others: 9.00 GiB for",
        "sparse on Metal works",
        "canary: 2 steps in 1.5 s, passed",
        "    map: two blocks",
        "heaps are kept until the process ends: no release test has passed here",
        "paged on Metal  does not work",
        "canary: 1 steps in 0.5 s, failed: map: refused",
        "    FAILED map: refused",
        "dense on Metal  not here: the device's memory is not the processor's",
        "posix           works",
    ):
        assert words in said
    assert "missing_for" not in said
    assert said.endswith("sparse on Metal: it passed its canary\nsparse on Metal can serve.")


def test_the_reasons_of_a_choice_have_their_name() -> None:
    said = text(replace(MAC, reasons=("not sparse on Metal: it hung", "paged on Metal: it passed")))
    choice = "choice     not sparse on Metal: it hung\n           paged on Metal: it passed"
    assert f"\n\n{choice}\nsparse on Metal can serve." in said


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (replace(MAC, chosen=None), "Nothing can serve as configured."),
        (
            with_sparse(kernels=FAILED),
            "sparse on Metal would serve, and it does not work here: map: refused.",
        ),
        (replace(MAC, chosen=Substrate.POSIX), "posix can serve."),
    ],
)
def test_the_last_line_is_the_verdict(report: DoctorReport, words: str) -> None:
    assert report_lines(report)[-1] == words


def test_an_extension_that_does_not_fit_is_said_first() -> None:
    broken = Extension("0.32.5", "it ended with exit code 1: ImportError: no", {})
    said = text(replace(MAC, extension=broken, device=None))
    assert "extension  cannot be loaded: it ended with exit code 1: ImportError: no" in said
    assert "Metal      not in this build" in said
    other = text(replace(MAC, extension=Extension("0.32.5", "", SAID), device=None))
    assert "built for MLX 0.32.4, which is not what is installed" in other
    assert "Metal      no device" in other


def test_a_release_test_is_told_of_with_what_follows_from_it() -> None:
    said = text(with_sparse(release=PASSED, releases_heaps=True, remembered="/somewhere"))
    assert "release test: 2 steps in 1.5 s, passed" in said
    assert "written down: /somewhere" in said
    assert "heaps are given back when they are empty, unless cache.release_heaps is false" in said


def test_a_stress_test_is_told_of_with_its_last_word() -> None:
    said = text(with_sparse(stress=PASSED))
    assert "stress test: 2 steps in 1.5 s, passed\n    in order\n" in said
    failed = text(with_sparse(stress=replace(FAILED, steps=())))
    assert "stress test: 0 steps in 0.5 s, failed: map: refused\n  heaps" in failed
    assert "sparse on Metal would serve, and it does not work here: map: refused." in failed


def test_what_should_be_done_is_told_before_the_verdict() -> None:
    said = text(replace(MAC, wheel="macosx_15_0", warnings=("the wheel is old", *MAC.reasons)))
    assert "MLX        0.32.4, macosx_15_0\n" in said
    assert "passed its canary\nwarning    the wheel is old\nsparse on Metal can serve." in said


def test_what_a_substrate_has_done_here_is_told_with_what_became_of_it() -> None:
    said = text(with_sparse(faults=("it hung", "it crashed"), standing_faults=("it hung",)))
    assert "works\n  has failed here: it hung\n" in said
    assert "  had failed here, which is forgotten now: it crashed\n" in said
    assert "not here: no\n  has failed here: it hung" in text(
        with_sparse(missing="no", standing_faults=("it hung",))
    )
