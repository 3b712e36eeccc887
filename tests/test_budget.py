"""The project grows only in commits that say what for."""

import subprocess
from pathlib import Path

import pytest

from tests import budget

ROOT = Path(__file__).parents[1]
STEP = """
class EngineLoop:
    def step(self):
        '''Run a step.'''
        plan = self.plan()
        if plan:
            self.launch(plan)
            self.retire()
        return plan
"""


class Checkout:
    """A small project under git, with a table of today's figures."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet")
        for name, value in (("name", "somebody"), ("email", "somebody@example.invalid")):
            self.git("config", f"user.{name}", value)
        self.write("engine/one.py", "a = 1\n" * 100)
        self.write_table()
        self.commit("engine: begin")

    def git(self, *arguments: str) -> None:
        subprocess.run(("git", "-C", str(self.root), *arguments), check=True)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_table(self, **more: int) -> None:
        counts = {"lines": 100, "files": 1, "small_files": 0, "vague_names": 0} | more
        self.write(budget.TABLE, budget.format_table({"engine": counts}))

    def commit(self, subject: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", subject)

    def excesses(self) -> list[str]:
        table = budget.read_table(self.root, "HEAD")
        assert table is not None
        return budget.excesses(budget.count_files(self.root), table)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "figures"),
    [
        ("engine/long.py", "b = 2\n" * 400, {"500 lines", "2 files"}),
        ("engine/short.py", "b = 2\n", {"101 lines", "2 files", "1 small_files"}),
        ("engine/models/families/new.py", "b = 2\n", {"101 lines", "2 files"}),
        ("engine/vague.py", "def found(its):\n    said = its\n" * 40, None),
        ("kvcache/README.md", "one two three", set()),
        ("engine/kernel.metal", "\n" * 70, {"170 lines", "2 files"}),
        ("engine/vendor/other.py", "b = 2\n" * 400, set()),
        ("engine/model.safetensors", "b = 2\n" * 400, set()),
    ],
)
def test_what_grows_is_named_with_its_room_before_it_is_committed(
    checkout: Checkout, name: str, text: str, figures: set[str] | None
) -> None:
    assert checkout.excesses() == []
    checkout.write(name, text)
    lines = checkout.excesses()
    if figures is None:
        assert "engine: 120 vague_names, and its budget is 0" in lines
    elif name.endswith(".md"):
        assert lines == ["kvcache: 3 words, and its budget is 0"]
    else:
        assert {line.removeprefix("engine: ").partition(",")[0] for line in lines} == figures


@pytest.mark.parametrize(
    ("subject", "beside", "errors"),
    [
        ("budget: 50 lines of engine for drafts", False, 0),
        ("engine: draft tokens", False, 1),
        ("budget: 50 lines of engine for drafts", True, 1),
    ],
)
def test_a_budget_rises_only_in_a_commit_of_its_own_that_says_what_for(
    checkout: Checkout, subject: str, beside: bool, errors: int
) -> None:
    checkout.write_table(lines=150)
    if beside:
        checkout.write("engine/one.py", "a = 1\n" * 150)
    checkout.commit(subject)
    lines = budget.unpaid_raises(checkout.root)
    assert len(lines) == errors
    assert all(f'"{subject}", raises engine: 150 lines' in line for line in lines)


def test_a_budget_may_fall_in_any_commit(checkout: Checkout) -> None:
    checkout.write_table(lines=90)
    checkout.write("engine/one.py", "a = 1\n" * 90)
    checkout.commit("engine: shorten")
    assert budget.unpaid_raises(checkout.root) == []
    assert budget.lower(
        {"engine": {"lines": 80, "files": 2}}, {"engine": {"lines": 90, "files": 1}}
    ) == {"engine": {"lines": 80, "files": 1}}


def test_statements_of_the_step_count_wherever_they_stand() -> None:
    assert budget.count_step_statements(STEP) == 4
    assert budget.count_step_statements(STEP.replace("return plan", "plan = 1; return plan")) == 5
    today = (ROOT / "engine/step/loop.py").read_text()
    count = budget.count_step_statements(today)
    planted = today.replace("self._publish([", "x = 1\n        self._publish([", 1)
    assert budget.count_step_statements(planted) == count + 1


def test_a_circle_of_imports_is_one_however_long() -> None:
    line = {"a": {"b"}, "b": {"c"}, "c": set[str](), "d": {"a"}}
    assert budget.circles(line) == []
    assert budget.circles(line | {"c": {"a"}}) == [{"a", "b", "c"}]
    assert len(budget.circles(line | {"b": {"a"}, "c": {"d"}, "d": {"c"}})) == 2
