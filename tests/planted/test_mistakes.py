import ast
from pathlib import Path

import pytest

from tests.planted.suites import ROOT, AnchorError, pattern, read_mistakes, try_simulation

# Those that the first seeds find; the suite has many more, and takes an hour.
SWITCHES = {
    "the slot that a sequence works in leaks when it ends": "--states",
    "a slow reader is never cut": "--slow-readers",
    "memory is mapped beside steps": "--mapping-points",
}


@pytest.mark.parametrize("text", ["end.at", "end->at", "2 < end.at", "end.at(1)", "(end.at + 1)"])
def test_a_mistake_does_not_replace_a_value_whose_member_is_used(text: str) -> None:
    assert pattern("end").search(text) is None
    assert pattern(text).search(text)


def test_what_a_mistake_replaces_stands_in_its_function_once() -> None:
    errors = []
    for mistake in read_mistakes():
        text = (ROOT / mistake.file).read_text()
        try:
            planted = mistake.plant(text)
        except AnchorError as error:
            errors.append(f"{mistake.name}: {error}")
            continue
        assert planted != text, mistake.name
        assert mistake.parts
        if mistake.file.endswith(".py"):
            ast.parse(planted, mistake.name)
    assert errors == []


@pytest.mark.parametrize("name", SWITCHES)
def test_the_simulator_finds_a_mistake_and_names_the_switch_that_shows_it(
    name: str, tmp_path: Path
) -> None:
    (mistake,) = (mistake for mistake in read_mistakes() if mistake.name == name)
    assert SWITCHES[name] in try_simulation(mistake, tmp_path)
