"""Every defect has its tests, and how these end on another checkout is told apart."""

import sys
from pathlib import Path

import pytest

from tests.abuse import defects
from tests.abuse.against import Outcome, Place, Run, ended, judged, places, run_there
from tests.abuse.defects import Defect


def test_no_defect_is_without_a_test_that_is_there() -> None:
    assert defects.untested() == []


def test_what_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    named = "abuse/test_defects.py::test_what_is_not_there_is_found"
    rows = {
        "good": Defect("", (named, named + "[any]")),
        "stays": Defect("", stays="because"),
        "bare": Defect(""),
        "renamed": Defect("", (named[:-1], "abuse/nowhere.py::test_x")),
    }
    monkeypatch.setattr(defects, "DEFECTS", rows)
    assert defects.untested() == ["bare", named[:-1], "abuse/nowhere.py::test_x"]
    assert list(defects.described())[-3:] == [
        "defect renamed: ",
        f"    tests/{named[:-1]}",
        "    tests/abuse/nowhere.py::test_x",
    ]


NO_SETTING = "pydantic_core._pydantic_core.ValidationError: 1 validation error for Config"


@pytest.mark.parametrize(
    ("code", "said", "run"),
    [
        (0, "1 passed", Run(Outcome.PASSES)),
        (
            1,
            "x\nE   assert 1 == 2\nE    + where\nE   more",
            Run(Outcome.FAILS, "assert 1 == 2; + where"),
        ),
        (1, "E   AttributeError: x", Run(Outcome.LACKS, "AttributeError: x")),
        (
            1,
            "E   TypeError: f() got an argument",
            Run(Outcome.LACKS, "TypeError: f() got an argument"),
        ),
        (1, "E   TypeError: 'None' is not", Run(Outcome.FAILS, "TypeError: 'None' is not")),
        (1, f"E   {NO_SETTING}", Run(Outcome.LACKS, NO_SETTING)),
        (1, "E       fixture 'quire' not found", Run(Outcome.LACKS, "fixture 'quire' not found")),
        (4, "E   ImportError: no x", Run(Outcome.LACKS, "ImportError: no x")),
        (4, "ERROR: not found", Run(Outcome.LACKS, "pytest ended with 4")),
        (-11, "", Run(Outcome.FAILS, "pytest ended with -11")),
    ],
)
def test_what_is_missing_is_told_from_what_is_wrong(code: int, said: str, run: Run) -> None:
    assert judged(code, said) == run


def test_what_hangs_or_takes_the_machines_memory_is_ended(tmp_path: Path) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert ended(sleeps, tmp_path, 0.2) == Run(Outcome.FAILS, "does not end within 0 s")
    assert ended(sleeps, tmp_path, 60, 1) == Run(Outcome.FAILS, "takes more than 0 GiB")


TEST = """
from product import VALUE
from tests.plain import OURS
from tests.support import WANTED


def test_it():
    assert {}
"""


def test_our_tests_run_on_another_product_with_what_its_own_are_built_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "product.py").write_text("VALUE = 1")
    (tmp_path / "server.py").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "plain.py").write_text("WANTED = 9")
    (tmp_path / "tests" / "support.py").write_text("import server\nWANTED = 2")
    (tmp_path / "tests" / "test_it.py").write_text("def test_it(): pass")
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "test_it.py").write_text(TEST.format("VALUE == WANTED"))
    (ours / "test_more.py").write_text(TEST.format("WANTED.more == VALUE"))
    (ours / "support.py").write_text("WANTED = type('', (), {'more': 3})")
    (ours / "plain.py").write_text("OURS = 0")
    monkeypatch.setattr("tests.abuse.against.TESTS", ours)
    monkeypatch.setattr("tests.abuse.against.PLUGIN", "no:nothing")
    with places(tmp_path) as there:
        found = [run_there(f"test_{name}.py", there) for name in ("it", "more")]
    assert found[0] == Run(Outcome.FAILS, "assert 1 == 2")
    assert found[1] == Run(Outcome.FAILS, "assert 3 == 1; +  where 3 = WANTED.more")
    assert all(isinstance(place, Place) and not place.folder.exists() for place in there)
