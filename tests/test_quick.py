"""What ``make quick`` chooses."""

from pathlib import Path

import grimp
import pytest

from tests import quick

MODULES = {
    "engine/step/loop.py": "",
    "engine/step/scheduler.py": "",
    "engine/step/token_budget.py": "",
    "kvcache/manager.py": "",
    "kvcache/unused.py": "",
    "server/app.py": "",
    "tests/conftest.py": "",
    "tests/engines.py": "import engine.step.loop",
    "tests/engine/step/test_loop.py": "import tests.engines",
    "tests/engine/test_recall.py": "import tests.engines",
    "tests/engine/step/test_scheduler.py": "import engine.step.scheduler",
    "tests/engine/planning/test_devices.py": "import engine.step.scheduler",
    "tests/kvcache/test_manager.py": "import kvcache.manager",
    "tests/server/test_app.py": "import engine.step.scheduler",
}


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> grimp.ImportGraph:
    """A small house: engine.step.loop imports engine.step.scheduler."""
    monkeypatch.setattr(quick, "ROOT", tmp_path)
    graph = grimp.ImportGraph()
    for path, line in MODULES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
        if line:
            graph.add_import(importer=module_of(path), imported=line.removeprefix("import "))
        else:
            graph.add_module(module_of(path))
    graph.add_import(importer="engine.step.loop", imported="engine.step.scheduler")
    return graph


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("tests/engine/test_recall.py", {"tests/engine/test_recall.py"}),
        ("kvcache/manager.py", {"tests/kvcache/test_manager.py"}),
        (
            "engine/step/scheduler.py",
            {
                "tests/engine/step/test_scheduler.py",
                "tests/engine/step/test_loop.py",
                "tests/engine/planning/test_devices.py",
            },
        ),
        ("tests/engines.py", {"tests/engine/step/test_loop.py", "tests/engine/test_recall.py"}),
    ],
)
def test_mirrors_and_importers_of_the_room_are_chosen(
    path: str, tests: set[str], graph: grimp.ImportGraph
) -> None:
    assert quick.tests_of(path, graph) == tests


@pytest.mark.parametrize(
    "path",
    [
        "engine/step/token_budget.py",
        "engine/removed.py",
        "engine/csrc/kernel.cpp",
        "tests/engine/conftest.py",
    ],
)
def test_where_it_cannot_tell_the_whole_room_is_chosen(path: str, graph: grimp.ImportGraph) -> None:
    assert quick.tests_of(path, graph) == {"tests/engine"}


@pytest.mark.parametrize(
    "path", ["Makefile", "docker/compose.yaml", "tests/engine/test_removed.py"]
)
def test_what_has_no_room_has_no_tests_of_its_own(path: str, graph: grimp.ImportGraph) -> None:
    assert quick.tests_of(path, graph) == set()


@pytest.mark.parametrize(("found", "base"), [(["c0ffee"], "c0ffee"), ([], "HEAD")])
def test_what_a_branch_has_changed_is_touched_and_what_git_does_not_know_yet(
    found: list[str], base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        ("merge-base", "HEAD", "main"): found,
        ("diff", "--name-only", base): ["engine/step/loop.py"],
        ("ls-files", "--others", "--exclude-standard"): ["engine/new.py"],
    }
    monkeypatch.setattr(quick, "git", lambda *arguments: said[arguments])
    assert quick.touched() == ["engine/step/loop.py", "engine/new.py"]


def test_a_room_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit, match="there is no folder tests/attic"):
        quick.main(["attic"])
