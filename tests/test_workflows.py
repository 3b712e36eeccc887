"""The workflows name what exists: a runner would say so only after everything before it."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def everything_named(pattern: str) -> set[str]:
    return {match for path in WORKFLOWS for match in re.findall(pattern, path.read_text())}


@pytest.mark.parametrize("name", sorted(everything_named(r"(?<![\w./-])((?:tests|\.ci)/[\w./]+)")))
def test_a_file_that_a_workflow_names_exists_and_can_be_run(name: str) -> None:
    path = ROOT / name
    assert path.is_file() or (path / "Makefile").is_file()
    assert path.is_dir() or name.endswith((".py", ".md")) or os.access(path, os.X_OK)


@pytest.mark.parametrize("name", sorted(everything_named(r"-m (tests[\w.]*)")))
def test_a_module_that_a_workflow_names_exists(name: str) -> None:
    assert (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize(
    "name", sorted(everything_named(r"\bmake ((?:-C )?[\w./-]+(?: [\w./-]+)?)"))
)
def test_a_target_that_a_workflow_names_exists(name: str) -> None:
    folder, target = name.split()[1:] if name.startswith("-C ") else (".", name.split()[0])
    makefile = (ROOT / folder / "Makefile").read_text()
    targets = [
        line.split(":")[0] for line in makefile.splitlines() if re.match(r"[^\s#=]+.*:", line)
    ]
    assert target.replace(".venv", "$(VENV)") in " ".join(targets).split()


def test_the_comparison_reads_what_the_cross_build_writes() -> None:
    workflow = (ROOT / ".github/workflows/macos.yml").read_text()
    makefile = (ROOT / "tests/metal/cross/Makefile").read_text()
    assert "build/metal/cross-mac26/symbols.json" in workflow
    assert "$(BUILD)/cross-mac26/symbols.json" in makefile
